"""A tiny chat model with random weights, its tokenizer and adapters, written without torch: nothing is downloaded.

    python -m tests.real_engine.tiny_model DIRECTORY

A Qwen2 of two layers and some 300 thousand parameters: it answers with noise, and caches, hashes and announces blocks
like any other. The tokenizer is a byte-level BPE trained on the Python standard library's own sources, with the
normalizer and the splitting of Qwen2: loaders of that model type set them whatever the file says.

File formats: safetensors (length of a JSON header as 8 bytes little-endian, the header, the tensors), LoRA as PEFT
writes it.
"""

from __future__ import annotations

import json
import struct
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCABULARY = 4096
HIDDEN = 64
LAYERS = 2
MAX_LENGTH = 4096
WINDOW = 64
IMAGE_SIZE = 28
IMAGE_TOKENS = 49
_HEADS, _KV_HEADS, _INNER, _RANK = 2, 1, 128, 8
_SIGHT, _PATCH = 32, 4
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>")
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS_BYTES = 2_000_000

Shape = tuple[int, ...]

_QWEN2: Mapping[str, object] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": _INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_LENGTH,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def write_model(directory: Path) -> Path:
    """The model and its tokenizer; the directory, for `vllm serve`."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(directory)
    _write_json(directory / "config.json", _QWEN2)
    _write_tensors(directory / "model.safetensors", _qwen2_shapes(), Random(0))
    return directory


def write_hybrid_model(directory: Path) -> Path:
    """A Gemma 3 of the same size, every second layer with a sliding window of `WINDOW` tokens: the engine keeps two
    groups of cache blocks for it."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(directory)
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": HIDDEN // _HEADS,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": HIDDEN // _HEADS,
        "sliding_window": WINDOW,
        "layer_types": [("sliding_attention", "full_attention")[layer % 2] for layer in range(LAYERS)],
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "bfloat16",
    }
    _write_json(directory / "config.json", config)
    head = HIDDEN // _HEADS
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= _projections(at)
        for name in ("q_norm", "k_norm"):
            shapes[f"{at}.self_attn.{name}.weight"] = (head,)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{at}.{name}_layernorm.weight"] = (HIDDEN,)
    _write_tensors(directory / "model.safetensors", shapes, Random(1))
    return directory


def write_seeing_model(directory: Path) -> Path:
    """A LLaVA: a CLIP of two layers in front of the Qwen2. An image takes `IMAGE_TOKENS` tokens of the prompt."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(directory)
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": _QWEN2,
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": _SIGHT,
            "intermediate_size": 2 * _SIGHT,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 1,
            "image_size": IMAGE_SIZE,
            "patch_size": _PATCH,
            "projection_dim": _SIGHT,
        },
        "image_token_index": _SPECIAL.index("<image>"),
        "image_seq_length": IMAGE_TOKENS,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    _write_json(directory / "config.json", config)
    square = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    sight = {"image_processor_type": "CLIPImageProcessor", "size": square, "crop_size": square}
    _write_json(directory / "preprocessor_config.json", sight)
    processor = {
        "processor_class": "LlavaProcessor",
        "image_token": "<image>",
        "patch_size": _PATCH,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
    }
    _write_json(directory / "processor_config.json", processor)
    shapes = {f"language_model.{name}": shape for name, shape in _qwen2_shapes().items()}
    shapes |= {
        "multi_modal_projector.linear_1.weight": (HIDDEN, _SIGHT),
        "multi_modal_projector.linear_1.bias": (HIDDEN,),
        "multi_modal_projector.linear_2.weight": (HIDDEN, HIDDEN),
        "multi_modal_projector.linear_2.bias": (HIDDEN,),
    }
    tower = "vision_tower.vision_model"
    shapes |= {
        f"{tower}.embeddings.class_embedding": (_SIGHT,),
        f"{tower}.embeddings.patch_embedding.weight": (_SIGHT, 3, _PATCH, _PATCH),
        f"{tower}.embeddings.position_embedding.weight": (IMAGE_TOKENS + 1, _SIGHT),
    }
    matrices = {f"self_attn.{name}_proj": (_SIGHT, _SIGHT) for name in ("q", "k", "v", "out")}
    matrices |= {"mlp.fc1": (2 * _SIGHT, _SIGHT), "mlp.fc2": (_SIGHT, 2 * _SIGHT)}
    norms = ["pre_layrnorm", "post_layernorm"]  # as CLIP spells it
    for layer in range(LAYERS):
        at = f"encoder.layers.{layer}"
        norms += [f"{at}.layer_norm1", f"{at}.layer_norm2"]
        for name, (rows, columns) in matrices.items():
            shapes |= {f"{tower}.{at}.{name}.weight": (rows, columns), f"{tower}.{at}.{name}.bias": (rows,)}
    for name in norms:
        shapes |= {f"{tower}.{name}.{part}": (_SIGHT,) for part in ("weight", "bias")}
    _write_tensors(directory / "model.safetensors", shapes, Random(2))
    return directory


def _qwen2_shapes() -> dict[str, Shape]:
    head = HIDDEN // _HEADS
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= _projections(at)
        for name, rows in (("q", _HEADS * head), ("k", _KV_HEADS * head), ("v", _KV_HEADS * head)):
            shapes[f"{at}.self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{at}.input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{at}.post_attention_layernorm.weight"] = (HIDDEN,)
    return shapes


def _projections(at: str) -> dict[str, Shape]:
    """The matrices of one decoder layer."""
    head = HIDDEN // _HEADS
    return {
        f"{at}.self_attn.q_proj.weight": (_HEADS * head, HIDDEN),
        f"{at}.self_attn.k_proj.weight": (_KV_HEADS * head, HIDDEN),
        f"{at}.self_attn.v_proj.weight": (_KV_HEADS * head, HIDDEN),
        f"{at}.self_attn.o_proj.weight": (HIDDEN, _HEADS * head),
        f"{at}.mlp.gate_proj.weight": (_INNER, HIDDEN),
        f"{at}.mlp.up_proj.weight": (_INNER, HIDDEN),
        f"{at}.mlp.down_proj.weight": (HIDDEN, _INNER),
    }


def write_adapter(directory: Path, *, seed: int) -> Path:
    """A LoRA adapter of the model, random as well; the directory, for `--lora-modules NAME=DIRECTORY`."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    _write_json(directory / "adapter_config.json", config)
    shapes: dict[str, Shape] = {}
    for layer in range(LAYERS):
        for name, rows in (("q", HIDDEN), ("v", HIDDEN // _HEADS * _KV_HEADS)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}_proj"
            shapes[f"{at}.lora_A.weight"] = (_RANK, HIDDEN)
            shapes[f"{at}.lora_B.weight"] = (rows, _RANK)
    _write_tensors(directory / "adapter_model.safetensors", shapes, Random(seed))
    return directory


def _write_tokenizer(directory: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(text, special=True) for text in _SPECIAL],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(_TEMPLATE)
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_prefix_space": False,
        "model_max_length": MAX_LENGTH,
    }
    _write_json(directory / "tokenizer_config.json", settings)


def _corpus() -> Iterator[str]:
    seen = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        seen += len(text)
        yield text
        if seen > _CORPUS_BYTES:
            return


def _write_tensors(path: Path, shapes: Mapping[str, Shape], random: Random) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, shape in shapes.items():
        begin = len(data)
        count = 1
        for length in shape:
            count *= length
        norm = name.endswith("norm.weight")
        for _ in range(count):
            # A bfloat16 is the upper half of a float.
            data += struct.pack("<f", 1.0 if norm else random.gauss(0.0, 0.02))[2:]
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, len(data)]}
    head = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1))


if __name__ == "__main__":
    sys.stdout.write(f"{write_model(Path(sys.argv[1]))}\n")
