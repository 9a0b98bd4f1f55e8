"""transformers' Llama with torch on a CPU, where both are installed; `language_speed.py` and `smollm2.py` start it.

Requests are JSON lines on stdin, answers JSON lines on the descriptor that the first argument names (`peers.py`).
Imports nothing of this project.
"""

import importlib.metadata
import json
import os
import sys
import time


class Measured:
    """A model of a folder in Hugging Face's form, in float32."""

    def __init__(self):
        self._models, self._optimizers = {}, {}

    def complete(self, folder, attention, threads, compiled, cache, prompts, num_tokens):
        """The tokens that follow prompts of equal length, greedy, and the seconds that took."""
        import torch

        model = self._model(folder, attention, compiled).eval()
        torch.set_num_threads(threads)
        given = torch.tensor(prompts)
        settings = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        if cache == "static":
            settings["cache_implementation"] = "static"
        with torch.inference_mode():
            found, spent = _timed(
                lambda: model.generate(given, attention_mask=torch.ones_like(given), **settings)[:, given.shape[1] :]
            )
        return {"tokens": found.tolist(), **spent}

    def train(self, folder, attention, threads, compiled, tokens, num_steps, rate, clip, decays, weight_decay):
        """Losses of optimizer steps on one batch, each before its update, and the seconds per step.

        The optimizer is torch's AdamW in its fused form, the fastest on a CPU.
        """
        import torch

        model = self._model(folder, attention, compiled).train()
        torch.set_num_threads(threads)
        key = folder, attention, compiled
        if key not in self._optimizers:
            self._optimizers[key] = torch.optim.AdamW(
                model.parameters(), lr=rate, betas=decays, eps=1e-8, weight_decay=weight_decay, fused=True
            )
        optimizer, rows, losses = self._optimizers[key], torch.tensor(tokens), []

        def steps():
            for _ in range(num_steps):
                loss = model(input_ids=rows, labels=rows, use_cache=False).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                losses.append(loss.detach())

        _, spent = _timed(steps)
        return {
            "losses": [loss.item() for loss in losses],
            **{name: value / num_steps for name, value in spent.items()},
        }

    def convert(self, gguf, folder):
        """Write a quantised SmolLM2 of a GGUF file in Hugging Face's form, in float32."""
        from tokenizers import pre_tokenizers
        from transformers import AutoModelForCausalLM, AutoTokenizer

        place, name = os.path.split(gguf)
        tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
        # What "smollm" in the file's `tokenizer.ggml.pre` means; transformers does not read that entry.
        parts = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(parts))
        tokenizer.save_pretrained(folder)
        quantised = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype="float32")
        said = quantised.config.to_dict()
        said.pop("quantization_config", None)  # null would be taken for one by some versions of transformers
        config = type(quantised.config)(**said)
        model = type(quantised)(config)
        model.load_state_dict(quantised.state_dict())
        model.save_pretrained(folder)
        return {}

    def answer(self, folder, message, num_tokens):
        """The prompt's tokens and the greedy answer's, without the one that ends it."""
        import torch
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            found = (
                self._model(folder, "sdpa", False).eval().generate(**prompt, max_new_tokens=num_tokens, do_sample=False)
            )
        start = prompt["input_ids"].shape[1]
        new = [token for token in found[0, start:].tolist() if token != tokenizer.eos_token_id]
        return {"prompt": found[0, :start].tolist(), "tokens": new, "text": tokenizer.decode(new)}

    def forget(self):
        """Free all models."""
        self._models.clear()
        self._optimizers.clear()
        return {}

    def _model(self, folder, attention, compiled):
        import torch
        from transformers import AutoModelForCausalLM

        key = folder, attention, compiled
        if key not in self._models:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", attn_implementation=attention)
            if compiled:
                model.forward = torch.compile(model.forward)
            self._models[key] = model
        return self._models[key]


def _timed(function):
    """What the function returns, and its CPU and wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    found = function()
    return found, {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}


def main():
    """Answer requests until there are no more."""
    measured = Measured()
    with os.fdopen(int(sys.argv[1]), "w") as answers:
        names = ("torch", "transformers")
        print(json.dumps({name: importlib.metadata.version(name) for name in names}), file=answers, flush=True)
        for line in sys.stdin:
            ((what, options),) = json.loads(line).items()
            print(json.dumps(getattr(measured, what)(**options)), file=answers, flush=True)


if __name__ == "__main__":
    main()
