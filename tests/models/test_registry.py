import json
import resource

import pytest
import torch

from autopar.errors import ModelError
from autopar.models import build, check, names, resolve
from autopar.models.hub import folder_of
from autopar.models.registry import PUBLISHED, builders

COUNTS = {  # parameters of the released checkpoints, tied ones once; GPT-3's were never released
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "resnet-18": 11_689_512,
    "resnet-50": 25_557_032,
    "resnet-101": 44_549_160,
    "resnet-152": 60_192_808,
    "vit-b": 86_567_656,
    "vit-l": 304_326_632,
    "vit-h": 632_045_800,
}


def count(model) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name, parameters", COUNTS.items())
def test_published_parameter_counts(name, parameters):
    assert count(build(name, batch=1, seq=8)[0]) == parameters


def test_gpt3_has_the_175_billion_of_its_name():
    assert 174.6e9 < count(build("gpt3-175b", batch=1, seq=8)[0]) < 175.2e9


def test_the_meta_device_holds_no_weights():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model, inputs = build("llama3-405b", batch=64, seq=4096)
    assert {p.device.type for p in model.parameters()} == {i.device.type for i in inputs.values()} == {"meta"}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB
    assert inputs["input_ids"].shape == inputs["labels"].shape == (64, 4096)


@pytest.mark.parametrize("name", [n for n in PUBLISHED if n.endswith("tiny")])
def test_every_process_builds_the_same(name):
    torch.manual_seed(1)
    (a, x), state = build(name, batch=2, seq=8, device="cpu"), torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state())  # the caller's random numbers are left alone
    torch.manual_seed(2)
    b, y = build(name, batch=2, seq=8, device="cpu")
    c, z = build(name, batch=2, seq=8, device="cpu", seed=5)
    for key, value in a.state_dict().items():
        assert torch.equal(value, b.state_dict()[key])
    assert all(torch.equal(x[key], y[key]) for key in x)
    assert not all(torch.equal(x[key], z[key]) for key in x)
    assert not all(torch.equal(value, c.state_dict()[key]) for key, value in a.state_dict().items())


def test_inputs():
    _, ids = build("gpt2-tiny", batch=3, seq=8, device="cpu")
    assert ids["input_ids"].dtype == torch.int64 and 0 <= ids["input_ids"].min() <= ids["input_ids"].max() < 256
    assert torch.equal(ids["input_ids"], ids["labels"])
    _, features = build("mlp-tiny", batch=3, seq=8, device="cpu")
    assert features["x"].shape == features["target"].shape == (3, 8, 64)
    assert not torch.equal(features["x"], features["target"])
    _, images = build("vit-tiny", batch=3, seq=8, device="cpu")
    assert images["pixel_values"].shape == (3, 3, 32, 32) and images["labels"].shape == (3,)


@pytest.mark.parametrize(
    "name", ["gpt2-tiny", "llama-tiny", "mlp-tiny", "moe-tiny", "resnet-tiny", "unet-tiny", "vit-tiny"]
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_dtype(name, device):
    model, inputs = build(name, batch=2, seq=8, device=device, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(i.dtype == torch.bfloat16 for i in inputs.values() if i.is_floating_point())
    assert model(**inputs).logits.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    "text, builder, sizes",
    [
        ("gpt", "gpt", dict(hidden=768, layers=12)),
        ("gpt:hidden=64,layers=2,heads=4,vocab=1_000", "gpt", dict(hidden=64, layers=2, ffn=256, vocab=1000)),
        (" llama : hidden = 64 , heads=4 ", "llama", dict(hidden=64, heads=4, kv_heads=4)),
        ("llama3-8b:layers=4,rope_theta=1e4", "llama", dict(hidden=4096, layers=4, ffn=14336, rope_theta=1e4)),
        ("GPT2:tied=False", "gpt", dict(tied=False)),
        ("mlp:bias=false,ffn=100", "mlp", dict(bias=False, ffn=100, hidden=256)),
        ("gpt2:", "gpt", dict(hidden=768)),
    ],
)
def test_options(text, builder, sizes):
    found, config = resolve(text)
    assert found == builder
    assert {key: getattr(config, key) for key in sizes} == sizes


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("gpt22", "no model named 'gpt22'(.|\n)*gpt2"),
        ("lama3-8b", "no model named 'lama3-8b'(.|\n)*llama3-8b"),
        ("gpt:hiden=64", "gpt has no option 'hiden'(.|\n)*use hidden"),
        ("gpt:kv_heads=2", "gpt has no option 'kv_heads'(.|\n)*heads"),
        ("gpt:layers=two", "layers=two is not a whole number"),
        ("gpt:layers=2.5", "layers=2.5 is not a whole number"),
        ("gpt:tied=maybe", "tied=maybe is not true or false"),
        ("llama:rope_theta=x", "rope_theta=x is not a number"),
        ("gpt:layers", "cannot read 'layers' as an option"),
        ("gpt:layers=2,layers=3", "option 'layers' is given twice"),
        ("moe-tiny:active=5", "active=5 of experts=4"),
        ("resnet:depth=51", "no ResNet of depth 51"),
        ("unet:image=100,levels=4", "halved 3 times"),
        ("vit:patch=15", "patch=15 does not divide image=224"),
        ("gpt:layers=0", "layers=0 is not a positive integer"),
        ("gpt:heads=5", "heads=5 does not divide hidden=768(.|\n)*heads=4"),
        ("gpt2-tiny:seq=4", "seq 8 is longer than the model's 4(.|\n)*seq=8"),
    ],
)
def test_refusals_name_the_nearest(text, complaint):
    with pytest.raises(ModelError, match=complaint):
        build(text, batch=1, seq=8)


@pytest.mark.parametrize("sizes", [dict(batch=0, seq=8), dict(batch=2, seq=-1), dict(batch=2.0, seq=8)])
def test_impossible_batches(sizes):
    with pytest.raises(ModelError, match="is not a positive integer"):
        build("gpt2-tiny", **sizes)


def test_names():
    assert names()[: len(builders())] == [*builders()] == ["gpt", "llama", "mlp", "moe", "resnet", "unet", "vit"]
    assert set(COUNTS) <= set(names())


# a user's own file ---------------------------------------------------------------------------------------------------


@pytest.fixture
def user_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def fixed():\n    return torch.nn.Linear(3, 3), {'input': torch.ones(2, 3)}\n"
        "def sized(batch, device='cpu'):\n    return torch.nn.Linear(3, 3, device=device), (torch.ones(batch, 3),)\n"
        "def fails():\n    raise KeyError('gone')\n"
        "def wrong():\n    return torch.nn.Linear(3, 3)\n"
        "def alone():\n    from transformers import LlamaConfig, LlamaForCausalLM\n"
        "    sizes = dict(vocab_size=32, hidden_size=8, intermediate_size=8, num_attention_heads=2)\n"
        "    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, max_position_embeddings=16, **sizes))\n"
    )
    return file


def test_function_of_a_file(user_file):
    model, inputs = build(f"{user_file}:fixed", batch=5, seq=8)
    assert model.weight.device.type == "cpu" and inputs["input"].shape == (2, 3)
    model, inputs = build(f"{user_file}:sized", batch=5, seq=8, device="meta")
    assert model.weight.device.type == "meta" and inputs[0].shape == (5, 3)


def test_a_transformers_model_alone_gets_inputs(user_file):
    model, inputs = build(f"{user_file}:alone", batch=5, seq=8)
    assert inputs["input_ids"].shape == (5, 8) and inputs["input_ids"].max() < 32
    assert torch.equal(inputs["labels"], inputs["input_ids"])
    assert model(**inputs).loss.isfinite()
    again, same = build(f"{user_file}:alone", batch=5, seq=8)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight) and torch.equal(same["labels"], inputs["labels"])
    with pytest.raises(ModelError, match="seq 17 is longer than the model's 16"):
        build(f"{user_file}:alone", batch=5, seq=17)


@pytest.mark.parametrize(
    "name, complaint",
    [
        ("fixd", "no function 'fixd'(.|\n)*use fixed"),
        ("fails", "raised KeyError: 'gone'(.|\n)*mine.py:7"),
        ("wrong", "returned Linear, neither a pair"),
    ],
)
def test_refused_functions(user_file, name, complaint):
    with pytest.raises(ModelError, match=complaint):
        build(f"{user_file}:{name}", batch=1, seq=8)


def test_refused_files(user_file):
    with pytest.raises(ModelError, match="there is no file(.|\n)*mine.py"):
        build(f"{user_file.parent}/mime.py:fixed", batch=1, seq=8)
    user_file.write_text("import nothing_of_this_name\n")
    with pytest.raises(ModelError, match="raised ModuleNotFoundError(.|\n)*mine.py:1"):
        build(f"{user_file}:fixed", batch=1, seq=8)


# Hugging Face configs ------------------------------------------------------------------------------------------------

SMALL = dict(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
GPT2 = dict(model_type="gpt2", vocab_size=128, n_positions=64, n_embd=32, n_layer=2, n_head=4)
LLAMA = dict(model_type="llama", num_key_value_heads=2, dtype="bfloat16", **SMALL)
BERT = dict(model_type="bert", max_position_embeddings=64, **SMALL)
T5 = dict(model_type="t5", vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_heads=4, decoder_start_token_id=0)
VIT = dict(model_type="vit", image_size=32, patch_size=8, num_hidden_layers=1, hidden_size=32, num_attention_heads=4)


def folder(tmp_path, described, architecture=None):
    if architecture:
        described = described | {"architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(described))
    return f"hf:{tmp_path}"


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(
    "described, architecture, kind, shapes",
    [
        (GPT2, None, "GPT2LMHeadModel", dict(input_ids=(2, 8), labels=(2, 8))),
        (LLAMA, "LlamaForCausalLM", "LlamaForCausalLM", dict(input_ids=(2, 8), labels=(2, 8))),
        (BERT, "BertForMaskedLM", "BertForMaskedLM", dict(input_ids=(2, 8), labels=(2, 8))),
        (BERT, "BertForSequenceClassification", "BertForSequenceClassification", dict(input_ids=(2, 8), labels=(2,))),
        (BERT, "BertForTokenClassification", "BertForTokenClassification", dict(input_ids=(2, 8), labels=(2, 8))),
        (
            BERT, "BertForQuestionAnswering", "BertForQuestionAnswering",
            dict(input_ids=(2, 8), start_positions=(2,), end_positions=(2,)),
        ),
        (T5, "T5ForConditionalGeneration", "T5ForConditionalGeneration", dict(input_ids=(2, 8), labels=(2, 8))),
        (VIT, "ViTForImageClassification", "ViTForImageClassification", dict(pixel_values=(2, 3, 32, 32), labels=(2,))),
    ],
)  # fmt: skip
def test_hugging_face_configs(tmp_path, described, architecture, kind, shapes, device):
    pytest.importorskip("transformers")
    model, inputs = build(folder(tmp_path, described, architecture), batch=2, seq=8, device=device)
    assert type(model).__name__ == kind
    assert {name: tuple(value.shape) for name, value in inputs.items()} == shapes
    assert {p.dtype for p in model.parameters()} == {torch.float32}  # whatever the config says
    loss = model(**inputs).loss
    assert loss.device.type == device and loss.ndim == 0


def test_hugging_face_file_and_dropout(tmp_path):
    pytest.importorskip("transformers")
    text = folder(tmp_path, GPT2 | {"attn_pdrop": 0.25})
    model, _ = build(f"{text}/config.json", batch=2, seq=8)
    assert (model.config.attn_pdrop, model.config.resid_pdrop) == (0.25, 0.1)


@pytest.mark.parametrize(
    "described, complaint",
    [
        (dict(model_type="lama"), "does not know the model type 'lama'(.|\n)*llama"),
        (dict(hidden_size=3), "has no model_type"),
        ([], "has no model_type"),
        (T5, "t5 has no causal language model(.|\n)*architectures"),
        (GPT2 | dict(n_positions=4), "seq 8 is longer than the model's 4"),
        *(
            (GPT2 | dict(architectures=[name]), f"names '{name}' under architectures, which is no model")
            for name in (
                "pipeline",
                "Trainer",
                "set_seed",
                "logging",
                "GPT2Config",
                "AutoModelForCausalLM",
                "PreTrainedModel",
            )
        ),
        (GPT2 | dict(architectures=3), "makes no model of the config of .*: TypeError"),
        (GPT2 | dict(architectures=["LlamaForCausalLM"]), "'GPT2Config' object has no attribute 'num_key_value_heads'"),
        (GPT2 | dict(n_layer=10**7), "n_layer=10000000 is more than 10,000"),
        (dict(model_type="llava", text_config=dict(num_hidden_layers=10**7)), "num_hidden_layers=10000000 is more"),
        (GPT2 | dict(n_head=0), "makes no model of the config of .*: ZeroDivisionError"),
        (GPT2 | dict(n_head=3), "`embed_dim` must be divisible by num_heads"),
        (GPT2 | dict(n_embd=-8), "negative dimension"),
        (GPT2 | dict(n_layer=None), "Validation error for field 'n_layer'"),
        (GPT2 | dict(activation_function="nope"), "KeyError: 'nope'"),
        (GPT2 | dict(model_type=["gpt2"]), "does not know"),
        (VIT | dict(image_size=-8, architectures=["ViTForImageClassification"]), "negative dimension"),
    ],
)
def test_refused_configs(tmp_path, described, complaint):
    pytest.importorskip("transformers")
    with pytest.raises(ModelError, match=complaint):
        build(folder(tmp_path, described), batch=2, seq=8)


def test_no_code_of_a_config_is_run(tmp_path, monkeypatch):
    """Nobody is asked whether it should be, either: a process without a terminal would wait for an answer."""
    pytest.importorskip("transformers")
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("somebody is asked"))
    remote = {"auto_map": {"AutoModelForCausalLM": "somebody/else--code.Model", "AutoConfig": "code.Config"}}
    with pytest.raises(ModelError, match="vit has no causal language model"):
        build(folder(tmp_path, VIT | remote), batch=2, seq=8)
    assert type(build(folder(tmp_path, GPT2 | remote), batch=2, seq=8)[0]).__name__ == "GPT2LMHeadModel"


def test_what_is_no_config_is_refused_in_a_moment(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text("[" * 10**6)
    with pytest.raises(ModelError, match="has no model_type"):
        build(f"hf:{tmp_path}", batch=2, seq=8)
    monkeypatch.setattr("autopar.models.huggingface.LONGEST_BYTES", 10**5)
    with pytest.raises(ModelError, match="has 1,000,000 bytes"):
        build(f"hf:{tmp_path}", batch=2, seq=8)


def test_sizes_that_no_machine_has(monkeypatch):
    with pytest.raises(ModelError, match="layers=10000000 is more than 10,000"):
        build("mlp:layers=10000000", batch=1, seq=8)
    with pytest.raises(ModelError, match="larger than the memory of this machine"):
        build("gpt:hidden=4000000,heads=2,layers=1", batch=1, seq=8, device="cpu")
    monkeypatch.setattr("autopar.models.sizes.MOST_MODULES", 30)
    with pytest.raises(ModelError, match="the model has more than 30 modules"):
        build("gpt2-tiny:layers=4", batch=1, seq=8)
    build("gpt2-tiny:layers=1", batch=1, seq=8)


def test_missing_config(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(ModelError, match="cannot read .*config.json"):
        build(f"hf:{tmp_path}", batch=2, seq=8)


def test_there_is_room_for_the_sequence_but_where_a_published_size_learns_positions():
    assert resolve("gpt:layers=2", 3000)[1].seq == 3000 and resolve("gpt:layers=2", 8)[1].seq == 1024
    assert resolve("gpt:layers=2,seq=16", 8)[1].seq == 16 and resolve("gpt2", 3000)[1].seq == 1024
    assert resolve("llama3-8b", 2**20)[1].seq == 2**20 and resolve("llama3-8b", 8)[1].seq == 8192
    assert resolve("moe-tiny", 3000)[1].seq == 3000 and resolve("llama3-8b:seq=16", 17)[1].seq == 16
    for text, longest in (("gpt:layers=2,seq=16", 16), ("llama-tiny:seq=16", 16), ("gpt2-tiny", 128)):
        with pytest.raises(ModelError, match=f"longer than the model's {longest}"):
            build(text, batch=1, seq=longest + 1)


def test_a_model_of_the_hub_is_found_in_the_cache(tmp_path, monkeypatch):
    """ORG/NAME, with or without hf:, finds it, the revision called main first; without it the error says what to do."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for text in ("some/model-7b", "hf:some/model-7b"):
        with pytest.raises(ModelError, match="nothing is downloaded") as caught:
            check(text)
        assert "hf download some/model-7b" in caught.value.fix and "hf:FOLDER" in caught.value.fix
    repository = tmp_path / "models--some--model-7b"
    for revision in ("0", "1", "2"):
        (repository / "snapshots" / revision).mkdir(parents=True)
        (repository / "snapshots" / revision / "config.json").write_text("{}")
    assert folder_of("some/model-7b").name == "0"
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1")
    assert folder_of("hf:some/model-7b") == repository / "snapshots" / "1"
    check("some/model-7b")


def test_a_folder_needs_no_prefix(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(dict(model_type="gpt2", n_embd=16, n_layer=1, n_head=2)))
    assert type(build(str(tmp_path), batch=1, seq=4)[0]) is type(build(f"hf:{tmp_path}", batch=1, seq=4)[0])
    with pytest.raises(ModelError, match="cannot read no/such/folder"):
        build("./no/such/folder", batch=1, seq=1)
