"""What PaliGemma's policies exchange with other projects: published PaliGemma, and a VLA trainer's backbone."""

from openpi_train.interop.checkpoint_format import Format
from openpi_train.interop.exchange import Exchange
from openpi_train.models.paligemma import big_vision, paligemma_torch, vla_checkpoint
from openpi_train.models.paligemma.paligemma import PaliGemmaFlowConfig

PALIGEMMA = Exchange(
    family="paligemma",
    models=(PaliGemmaFlowConfig,),
    formats=(
        Format(
            name="big_vision",
            summary="PaliGemma as published: an .npz file (pt_224.npz), or a folder with paligemma.npz",
            recognises=big_vision.recognises,
            by_ending=True,
            open=big_vision.open_checkpoint,
            prepare=big_vision.prepare,
            lacks=paligemma_torch.NOT_IN_IT,
            holds=paligemma_torch.HELD,
            has_norm_stats=False,
        ),
        Format(
            name="paligemma",
            summary="PaliGemma in Hugging Face's format: a directory with model.safetensors, or several and their "
            "index",
            recognises=paligemma_torch.recognises,
            open=paligemma_torch.open_checkpoint,
            prepare=paligemma_torch.prepare,
            lacks=paligemma_torch.NOT_IN_IT,
            holds=paligemma_torch.HELD,
            has_norm_stats=False,
            library="transformers",
        ),
        Format(
            name="vla",
            summary="start weights of a PaliGemma backbone: a checkpoint of the VLA's PyTorch trainer (best_model.pth)",
            recognises=vla_checkpoint.recognises,
            open=vla_checkpoint.open_checkpoint,
            lacks=paligemma_torch.NOT_IN_IT,
        ),
    ),
)
