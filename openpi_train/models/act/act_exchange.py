"""What ACT exchanges with other projects: LeRobot's policies, and torchvision's start weights of its backbone."""

from openpi_train.interop.checkpoint_format import Format
from openpi_train.interop.exchange import Exchange
from openpi_train.models.act import torchvision_resnet
from openpi_train.models.act.act import ActConfig
from openpi_train.models.act.lerobot_act import LEROBOT

ACT = Exchange(
    family="act",
    models=(ActConfig,),
    lerobot=LEROBOT,
    formats=(
        Format(
            name="torchvision",
            summary="start weights of ACT's backbone: torchvision's ResNet-18, a file by torch.save "
            "(resnet18-f37072fd.pth)",
            recognises=torchvision_resnet.recognises,
            open=torchvision_resnet.open_checkpoint,
            lacks=torchvision_resnet.NOT_IN_IT,
        ),
    ),
)
