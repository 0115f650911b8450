"""With inputs="local" and pad=, ranks have lengths of their own: the call is that of the whole batch padded to its
longest, and each rank has its outputs in its own length. Without pad=, lengths that differ are an error on all
ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import AutoparError, InputError
from autopar.models.output import Output
from tests.faithful.nets import Block
from tests.helpers import gloo

from . import tiny
from .parity import assert_close, assert_same_gradients, device_mesh, pair

BATCH, VOCABULARY = 4, 96
PAD = {"input_ids": 0, "labels": -100, "attention_mask": 0}


def _batch(longest: list[int], seed: int, side: str = "right") -> list[dict[str, torch.Tensor]]:
    """Return for each part the batch that its rank pads to its longest sample, whose length `longest` says."""
    generator, parts = torch.Generator().manual_seed(seed), []
    for length in longest:
        lengths = torch.randint(2, length + 1, (BATCH // len(longest),), generator=generator)
        lengths[0] = length
        places = torch.arange(length) if side == "right" else torch.arange(length).flip(0)
        mask = (places < lengths[:, None]).long()
        ids = torch.randint(1, VOCABULARY, mask.shape, generator=generator) * mask
        parts.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return parts


def _whole(parts: list[dict[str, torch.Tensor]], side: str = "right") -> dict[str, torch.Tensor]:
    """Return the batch that one process pads to its longest sample."""
    longest = max(part["labels"].shape[1] for part in parts)

    def widths(x):
        missing = longest - x.shape[1]
        return (missing, 0) if side == "left" else (0, missing)

    return {name: torch.cat([F.pad(p[name], widths(p[name]), value=value) for p in parts])
            for name, value in PAD.items()}  # fmt: skip


class Language(nn.Module):
    """input_ids and attention_mask (B, S) -> logits (B, S, V) and the mean loss of the labels that are not -100."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.block, self.head = nn.Embedding(VOCABULARY, 12), Block(12), nn.Linear(12, VOCABULARY)

    def forward(self, input_ids, attention_mask, labels):
        mask = attention_mask[..., None].float()
        x = self.embed(input_ids) * mask
        logits = self.head(self.block(x) + x.sum(1, keepdim=True) / mask.sum(1, keepdim=True))
        return Output(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


def _training(rank: int, mesh_text: str, side: str, strategy: str | None, is_llama: bool) -> None:
    """Losses inside and outside of the model, whole logits and their gradients, over lengths met for the first time and
    met before, by each rank alone and by both."""
    mesh = device_mesh(mesh_text)
    parts, mine = mesh.size(0), mesh.get_local_rank(0)
    pad = PAD if side == "right" else {name: (value, side) for name, value in PAD.items()}
    model = tiny.llama(num_hidden_layers=1)[0] if is_llama else Language()
    example = _batch([5, 3], 0, side)[mine]
    parallel, reference = pair(model, mesh, example, inputs="local", pad=pad, strategy=strategy)
    for step, longest in enumerate(([5, 3], [4, 7], [3, 7])):
        batches = _batch(longest, step, side)
        whole, length = _whole(batches, side), longest[mine]
        kept = slice(0, length) if side == "right" else slice(max(longest) - length, None)
        found, expected = parallel(**batches[mine]), reference(**whole)
        assert found.logits.shape == (BATCH // parts, length, VOCABULARY) and len(found.logits) == BATCH // parts
        assert_close(found.loss, expected.loss, f"loss of step {step}")
        logits = expected.logits.chunk(parts)
        assert_close(found.logits * 1, logits[mine][:, kept], f"logits of step {step}")
        weights = [torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(part)) for part in range(parts)]
        (found.loss + (found.logits @ weights[mine]).mean()).backward()
        own = [slice(0, n) if side == "right" else slice(max(longest) - n, None) for n in longest]
        outside = [(logits[part][:, own[part]] @ weights[part]).mean() for part in range(parts)]
        (expected.loss + sum(outside) / parts).backward()
        assert_same_gradients(parallel, reference)
    with torch.no_grad():
        assert_close(parallel.eval()(**batches[mine]).logits * 1, logits[mine][:, kept])


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("mesh, side, strategy, is_llama", [
    ("dp=2", "right", "ddp", False), ("dp=2", "right", "ddp", True), ("dp=2,tp=2", "left", "megatron", True),
    ("dp=2", "left", "fsdp", True), ("dp=2,tp=2", "right", None, True),
])  # fmt: skip
def test_training_is_that_of_the_whole_batch(mesh, side, strategy, is_llama):
    gloo.run(2 if mesh == "dp=2" else 4, _training, mesh, side, strategy, is_llama)


class Translator(nn.Module):
    """source (B, S), target (B, T) -> logits (B, T, V), those but the last, backwards, memory (B, S, width), pooled
    (B, width)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.block, self.head = nn.Embedding(16, 12), Block(12), nn.Linear(12, 16)

    def forward(self, source, target, scale):
        memory = self.embed(source) * (source != 0)[..., None]
        pooled = memory.sum(1)
        y = self.block(self.embed(target) + pooled[:, None])
        logits = self.head(y) * scale
        return {
            "logits": logits,
            "but the last": logits[:, :-1],
            "turned": logits.flip(1),
            "memory": memory,
            "pooled": pooled,
        }


def _of_two_lengths(rank: int) -> None:
    """Two inputs with lengths of their own; floats that require gradients; an output whose length is not known."""
    mesh, generator = device_mesh("dp=2"), torch.Generator().manual_seed(1)
    tokens = lambda *shape: torch.randint(1, 16, shape, generator=generator)  # noqa: E731
    parts = [(tokens(2, 4), tokens(2, 6), torch.rand(2, 6, 1)), (tokens(2, 6), tokens(2, 3), torch.rand(2, 3, 1))]
    parts = [(a, b, c.requires_grad_()) for a, b, c in parts]
    pad = {"source": 0, "target": 0, "args[2]": 0.0}
    parallel, reference = pair(Translator(), mesh, parts[rank], inputs="local", pad=pad)
    longer = [[F.pad(x, (0, 0) * (x.dim() - 2) + (0, 6 - x.shape[1])) for x in part] for part in parts]
    found, expected = parallel(*parts[rank]), reference(*(torch.cat(xs) for xs in zip(*longer)))
    source, target, _ = (x.shape[1] for x in parts[rank])
    for name, length in {"logits": target, "but the last": target - 1, "memory": source, "pooled": 12}.items():
        wanted = expected[name].chunk(2)[rank][:, :length]
        assert found[name].shape == wanted.shape
        assert_close(found[name] * 1, wanted, name)
    with pytest.raises(InputError, match="does not say which places of output turned") as error:
        found["turned"].sum()
    assert "(4, 6, 16)" in str(error.value) and "as long as the inputs" in str(error.value)
    found["logits"].square().mean().backward()
    # the gradient of a rank's own input is that of its own loss
    (wanted,) = torch.autograd.grad(expected["logits"].chunk(2)[rank][:, : target].square().mean(),
                                    parts[rank][2], retain_graph=True)  # fmt: skip
    assert_close(parts[rank][2].grad, wanted)
    same = [torch.ones(2, 5, dtype=torch.long), torch.ones(2, 5, dtype=torch.long), torch.ones(2, 5, 1)]
    assert parallel(*same)["turned"].sum().isfinite(), "all ranks have the same length"


@pytest.mark.gloo
def test_two_lengths_and_an_output_without():
    gloo.run(2, _of_two_lengths)


class Summed(nn.Module):
    """Writes to its input."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        x.add_(1.0)
        return self.head(x)


def _errors(rank: int) -> list[str]:
    """Return what ranks are told of lengths that differ without pad, though each of them is known, and of the rest."""
    mesh, errors = device_mesh("dp=2"), []

    def refused(call, *args, **kwargs):
        with pytest.raises(AutoparError) as error:
            call(*args, **kwargs)
        errors.append(str(error.value))

    def compiled(model, length, **options):
        return pair(model, mesh, (torch.ones(2, length, 3),), inputs="local", **options)[0]

    refused(compiled, nn.Linear(3, 3), 4 + rank)
    parallel = compiled(nn.Linear(3, 3), 4)
    for length in (4, 5):
        parallel(torch.ones(2, length, 3))
    refused(parallel, torch.ones(2, 4 + rank, 3))
    parallel(torch.ones(2, 5, 3))  # goes on
    refused(compiled, nn.Linear(3, 3), 4, pad={"tokens": 0})
    refused(pair, nn.Linear(3, 3), mesh, (torch.ones(2, 4, 3),), pad={"input": 0})
    parallel = compiled(nn.Linear(3, 3), 4 + rank, pad={"input": 0})
    refused(parallel, torch.ones(2 + rank, 4, 3))
    parallel = compiled(Summed(), 4 + rank, pad={"x": 0})
    refused(parallel, torch.ones(2, 4 + rank, 3))
    return errors


@pytest.mark.gloo
def test_what_differs_without_pad_is_an_error_on_all_ranks():
    for errors in gloo.run(2, _errors):
        compiled, known, unknown_name, whole, samples, written = errors
        for error in (compiled, known, samples):
            assert "pad={'input_ids'" in error, error
        assert "(2, 4, 3)" in known and "(2, 5, 3)" in known and "rank 1" in known
        assert "pad has a value for tokens, which the forward does not take" in unknown_name and "input" in unknown_name
        assert 'pass inputs="local"' in whole
        assert "rank" in samples and "(3, 4, 3)" in samples
        assert "the model writes to args[0], of which ranks have lengths of their own" in written


def _generated(rank: int) -> None:
    """Ranks continue prompts of lengths of their own, greedily and sampled, between steps of training."""
    mesh, generator = device_mesh("dp=2"), torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, VOCABULARY, (2, length), generator=generator) for length in (3, 5)]
    model, _ = tiny.gpt2(n_layer=1, bos_token_id=0, eos_token_id=0)
    left = {name: (value, "left") for name, value in (PAD | {"position_ids": 0}).items()}
    batches = _batch([5, 3], 0, "left")
    parallel, reference = pair(model, mesh, batches[rank], inputs="local", pad=left)
    for options in (dict(do_sample=False), dict(do_sample=True, top_k=20)):
        found = []
        for m in (parallel.eval(), reference.eval()):
            torch.manual_seed(5)
            tokens = m.generate(prompts[rank], max_new_tokens=2, min_new_tokens=2, use_cache=False, pad_token_id=0,
                                **options)  # fmt: skip
            found.append(tokens.tolist())
        assert found[0] == found[1]
    parallel.train()(**batches[rank]).loss.backward()
    reference.train()(**_whole(batches, "left")).loss.backward()
    assert_same_gradients(parallel, reference)
    parallel.pad_with(PAD | {"position_ids": 0})
    with pytest.raises(InputError, match="counted from the end, which are padding"):
        parallel.eval().generate(prompts[rank], max_new_tokens=2, use_cache=False, pad_token_id=0)


@pytest.mark.slow
@pytest.mark.gloo
def test_generate_by_rank():
    gloo.run(2, _generated)


def _in_stages(rank: int) -> None:
    mesh = device_mesh("pp=2,dp=2")
    mine = mesh.get_local_rank("dp")
    batches = _batch([5, 3], 0)
    model, _ = tiny.gpt2()
    parallel, reference = pair(model, mesh, batches[mine], inputs="local", pad=PAD, micro_batches=2,
                               outputs="everywhere")  # fmt: skip
    for longest in ([5, 3], [3, 5]):
        batches = _batch(longest, sum(longest))
        found, expected = parallel(**batches[mine]), reference(**_whole(batches))
        assert_close(found.loss, expected.loss)
        assert_close(found.logits * 1, expected.logits.chunk(2)[mine][:, : longest[mine]])


@pytest.mark.slow
@pytest.mark.gloo
def test_stages():
    gloo.run(4, _in_stages)
