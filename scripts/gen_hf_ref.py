#!/usr/bin/env python3
"""Writes tests/data/hf: tiny Hugging Face folders and tokenizers, with what Transformers and Tokenizers make of them.

Usage: python3 scripts/gen_hf_ref.py [models] [quant] [tokenizers] [real]   (from the repository root; default: all but
real)

Makes a virtual environment in ~/.cache/llmrun/hf-venv with torch, transformers, tokenizers, safetensors and
sentencepiece if there is none (several GB), and runs itself in it.

models      random models of each architecture, two layers or so, in BF16, F16 and F32; ref/NAME.json has prompt ids and
            logits in float32 of the weights as they were rounded
quant       one random layer in each quantized format, packed by the rules written out here; the logits are those of
            the dequantized weights. The rules give what pack() of AutoGPTQ 0.7.1 and AutoAWQ 0.2.9 and pack_to_int32 of
            compressed-tensors give for the same integers
tokenizers  trained on a few texts; ref/tokenizers.json has ids
real        SmolLM2's GGUF file as a folder in ~/.cache/llmrun, for tests/bench/hf_real.lua (needs the package gguf)
"""
import json
import os
import subprocess
import sys

import usage

WHAT, = usage.arguments("[WHAT...]")
for word in WHAT:
    if word not in ("models", "quant", "tokenizers", "real"):
        usage.refuse(f"unknown argument '{word}'")

VENV = os.path.expanduser("~/.cache/llmrun/hf-venv")
PACKAGES = ["torch", "numpy", "transformers", "tokenizers", "safetensors", "sentencepiece", "protobuf"]
if os.path.realpath(sys.prefix) != os.path.realpath(VENV):
    if not os.path.exists(VENV + "/ready"):
        subprocess.check_call([sys.executable, "-m", "venv", VENV])
        subprocess.check_call([VENV + "/bin/pip", "-q", "install", *PACKAGES])
        open(VENV + "/ready", "w").close()
    os.execv(VENV + "/bin/python3", [VENV + "/bin/python3", *sys.argv])

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

DIR = "tests/data/hf"
IDS = [1, 72, 101, 108, 108, 111, 32, 200, 150, 9, 33, 257, 64, 65, 90, 40]
ROWS = [0, 6, 15]
VOCAB = 264

torch.set_num_threads(2)
transformers.logging.set_verbosity_error()


def write_json(path, value):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as f:
        json.dump(value, f, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
        f.write("\n")


def logits_of(model, ids=None):
    ids = ids or IDS
    with torch.no_grad():
        out = model(torch.tensor([ids])).logits[0].float()
    return {"ids": ids, "rows": ROWS,
            "logits": [[float(f"{x:.7g}") for x in out[r].tolist()] for r in ROWS],
            "best": out.argmax(-1).tolist()}


def randomize(model, seed, scale=0.25):
    """Weights large enough that logits differ, norms about one, biases that matter."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or ".ln_" in name:
                base = 0.0 if "gemma" in type(model).__name__.lower() else 1.0
                p.copy_(base + 0.3 * torch.rand(p.shape, generator=g) - 0.15)
            elif "embed" in name or "wte" in name:
                p.copy_(torch.randn(p.shape, generator=g))
            else:
                p.copy_(scale * torch.randn(p.shape, generator=g))
    return model


def tidy(folder):
    """Files that say the same each time: no versions, no generation config."""
    path = folder + "/config.json"
    c = json.load(open(path))
    c.pop("transformers_version", None)
    write_json(path, c)
    for name in ["generation_config.json"]:
        if os.path.exists(f"{folder}/{name}"):
            os.remove(f"{folder}/{name}")


# ---- plain models ----

SMALL = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=1, head_dim=32, max_position_embeddings=256, rms_norm_eps=1e-5,
             bos_token_id=1, eos_token_id=2, pad_token_id=None, attn_implementation="eager")


def small(**more):
    return {**SMALL, **more}


def tiny(**more):
    fields = small(**{**dict(hidden_size=32, intermediate_size=64, head_dim=16, num_hidden_layers=1,
                             tie_word_embeddings=True), **more})
    return {k: v for k, v in fields.items() if k != "head_dim" or v}


def moe(**more):
    return tiny(**{**dict(intermediate_size=32, num_experts_per_tok=2, experts_implementation="eager"), **more})


def byte_chars():
    """The characters that byte-level tokenizers write bytes with."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in shown]
    return [chr(b) if b in shown else chr(256 + rest.index(b)) for b in range(256)]


def byte_tokenizer():
    """A token a byte, for the tiny models."""
    special = [{"id": i, "content": c, "special": True, "normalized": False, "lstrip": False, "rstrip": False,
                "single_word": False} for i, c in enumerate(["<unk>", "<s>", "</s>"])]
    write_json(f"{DIR}/bytes/tokenizer.json", {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None, "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "unk_token": None, "byte_fallback": False, "ignore_merges": False, "merges": [],
                  "vocab": {"<unk>": 0, "<s>": 1, "</s>": 2, **{c: i + 3 for i, c in enumerate(byte_chars())}}}})
    write_json(f"{DIR}/bytes/tokenizer_config.json", {
        "bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>",
        "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"})


def models():
    t = transformers
    byte_tokenizer()
    kinds = {
        "llama-bf16": (t.LlamaForCausalLM(t.LlamaConfig(**small(tie_word_embeddings=True))), torch.bfloat16, "70KB"),
        "qwen2-f16": (t.Qwen2ForCausalLM(t.Qwen2Config(**small(num_hidden_layers=1, tie_word_embeddings=True,
                      rope_parameters={"rope_theta": 1e6, "rope_type": "default"}))), torch.float16, "10GB"),
        "qwen3-f32": (t.Qwen3ForCausalLM(t.Qwen3Config(**small(hidden_size=32, head_dim=32, intermediate_size=64,
                      num_hidden_layers=1, tie_word_embeddings=False))), torch.float32, "10GB"),
        "gemma3-bf16": (t.Gemma3ForCausalLM(t.Gemma3TextConfig(**small(hidden_size=32, intermediate_size=64, head_dim=16,
                        num_hidden_layers=6, sliding_window=8, query_pre_attn_scalar=16,
                        tie_word_embeddings=True))), torch.bfloat16, "10GB"),
        "mistral-llama3": (t.MistralForCausalLM(t.MistralConfig(**tiny(sliding_window=7, rope_parameters={
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64}))), torch.bfloat16, "10GB"),
        "gemma2-bf16": (t.Gemma2ForCausalLM(t.Gemma2Config(**tiny(sliding_window=7, query_pre_attn_scalar=24,
                        num_hidden_layers=2))), torch.bfloat16, "10GB"),
        "phi3-bf16": (t.Phi3ForCausalLM(t.Phi3Config(**tiny(original_max_position_embeddings=64, rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
            "long_factor": [1.0, 1.5, 2.5, 4.0, 6.5, 9.0], "short_factor": [1.0, 1.05, 1.1, 1.2, 1.35, 1.5],
            "original_max_position_embeddings": 64, "factor": 4.0}, head_dim=None))), torch.bfloat16, "10GB"),
        "olmo2-bf16": (t.Olmo2ForCausalLM(t.Olmo2Config(**tiny(head_dim=None))), torch.bfloat16, "10GB"),
        "granite-bf16": (t.GraniteForCausalLM(t.GraniteConfig(**tiny(
            head_dim=None, embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.2,
            logits_scaling=2.0))), torch.bfloat16, "10GB"),
        "smollm3-bf16": (t.SmolLM3ForCausalLM(t.SmolLM3Config(**tiny(
            num_hidden_layers=4, intermediate_size=32, head_dim=None, use_sliding_window=False))), torch.bfloat16, "10GB"),
        "mixtral-bf16": (t.MixtralForCausalLM(t.MixtralConfig(**moe(num_local_experts=4))), torch.bfloat16, "10GB"),
        "qwen2moe-bf16": (t.Qwen2MoeForCausalLM(t.Qwen2MoeConfig(**moe(
            num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32, head_dim=None))),
            torch.bfloat16, "10GB"),
        "qwen3moe-bf16": (t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**moe(
            num_experts=4, moe_intermediate_size=32, norm_topk_prob=True))), torch.bfloat16, "10GB"),
        "granitemoe-bf16": (t.GraniteMoeForCausalLM(t.GraniteMoeConfig(**moe(
            num_local_experts=4, embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.2,
            logits_scaling=2.0, head_dim=None))), torch.bfloat16, "10GB"),
        "gptoss-bf16": (t.GptOssForCausalLM(t.GptOssConfig(**moe(
            num_local_experts=4, sliding_window=7, layer_types=["sliding_attention"],
            rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "truncate": False,
                             "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0}))),
            torch.bfloat16, "10GB"),
        "gpt2-bf16": (t.GPT2LMHeadModel(t.GPT2Config(
            n_embd=32, n_layer=1, n_head=2, n_inner=64, vocab_size=VOCAB, n_positions=64, bos_token_id=1,
            eos_token_id=2, attn_implementation="eager")), torch.bfloat16, "10GB"),
    }
    for i, (name, (model, dtype, shard)) in enumerate(kinds.items()):
        if os.path.exists(f"{DIR}/ref/{name}.json") and os.environ.get("MISSING"):
            continue
        folder = f"{DIR}/models/{name}"
        randomize(model, 100 + i)
        model = model.to(dtype).eval()
        model.save_pretrained(folder, max_shard_size=shard)
        tidy(folder)
        model = type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        write_json(f"{DIR}/ref/{name}.json", logits_of(model.eval()))
        print(name)
    mxfp4()


def mxfp4():
    """gpt-oss as it is published: experts in MXFP4, the rest in BF16. The same model with experts that MXFP4 can hold."""
    from safetensors.torch import load_file
    tensors = load_file(f"{DIR}/models/gptoss-bf16/model.safetensors")
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    meant, out = {}, {}
    for name, w in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            meant[name] = out[name] = w
            continue
        rows = w.float().transpose(1, 2)  # (experts, outputs, inputs)
        blocks = rows.reshape(*rows.shape[:2], -1, 32)
        e = torch.floor(torch.log2(blocks.abs().amax(-1).clamp(min=1e-9))) - 2
        q = (blocks / 2 ** e[..., None])[..., None].sub(values).abs().argmin(-1)
        meant[name] = (values[q] * 2 ** e[..., None]).reshape(rows.shape).transpose(1, 2).contiguous().bfloat16()
        out[name + "_blocks"] = (q[..., 0::2] | q[..., 1::2] << 4).to(torch.uint8).contiguous()
        out[name + "_scales"] = (e + 127).to(torch.uint8)
    folder = f"{DIR}/models/gptoss-mxfp4"
    os.makedirs(folder, exist_ok=True)
    config = json.load(open(f"{DIR}/models/gptoss-bf16/config.json"))
    import tempfile
    with tempfile.TemporaryDirectory() as plain:
        write_json(plain + "/config.json", config)
        save_file(meant, plain + "/model.safetensors")
        model = transformers.GptOssForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager",
                                                               experts_implementation="eager")
    save_file(out, folder + "/model.safetensors")
    write_json(folder + "/config.json", config | {"quantization_config": {"quant_method": "mxfp4"}})
    write_json(f"{DIR}/ref/gptoss-mxfp4.json", logits_of(model.eval()))


# ---- quantized layers ----

QCONFIG = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
               num_key_value_heads=1, head_dim=32, max_position_embeddings=256, rms_norm_eps=1e-5, bos_token_id=1,
               eos_token_id=2, tie_word_embeddings=True, attn_implementation="eager")


def linears(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}


def pack_bits(u, bits):
    """(values, ...) of so many bits -> int32 words along the first dimension: one stream of bits, the lowest first."""
    u = u.astype(np.uint64)
    n = u.shape[0] * bits // 32
    out = np.zeros((n, *u.shape[1:]), dtype=np.uint64)
    for i in range(u.shape[0]):
        at = i * bits
        out[at // 32] |= u[i] << np.uint64(at % 32) & np.uint64(0xFFFFFFFF)
        if at % 32 + bits > 32:
            out[at // 32 + 1] |= u[i] >> np.uint64(32 - at % 32)
    return torch.from_numpy(out.astype(np.uint32).view(np.int32).copy())


def grid(w, bits, group, sym, order=None, scale_type=torch.float16):
    """Rounds w (n, k) to integers with a scale, and a zero point, for each group of inputs. Returns integers (n, k), scales
    and zero points (n, groups), the group of each input, and the weights that are so meant."""
    n, k = w.shape
    group_of = torch.arange(k) // group if order is None else order
    groups = int(group_of.max()) + 1
    top = 2 ** bits - 1
    scale, zero = torch.zeros(n, groups), torch.zeros(n, groups)
    for g in range(groups):
        part = w[:, group_of == g]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if sym:
            most = torch.maximum(-low, high)
            scale[:, g], zero[:, g] = 2 * most / top, 2 ** (bits - 1)
        else:
            scale[:, g] = (high - low) / top
            zero[:, g] = (-low / scale[:, g]).round().clamp(1, top)
    scale = scale.to(scale_type).float()
    s, z = scale[:, group_of], zero[:, group_of]
    q = (w / s + z).round().clamp(0, top)
    return q, scale, zero, group_of, (q - z) * s


def gptq(w, bits=4, group=32, sym=True, act_order=False, v2=False):
    n, k = w.shape
    order = None
    if act_order:
        order = torch.arange(k)[torch.randperm(k, generator=torch.Generator().manual_seed(5))] // group
    q, s, z, of, dense = grid(w, bits, group, sym, order)
    return {"qweight": pack_bits(q.T.numpy(), bits),
            "qzeros": pack_bits((z - (0 if v2 else 1)).numpy(), bits).T.contiguous(),
            "scales": s.T.contiguous().half(), "g_idx": of.int()}, dense


def awq(w, group=32):
    n, k = w.shape
    q, s, z, _, dense = grid(w, 4, group, False)
    columns = [0, 2, 4, 6, 1, 3, 5, 7]

    def pack(u):  # (rows, n) -> (rows, n / 8)
        u = u.numpy().reshape(u.shape[0], n // 8, 8)[:, :, columns]
        return pack_bits(u.transpose(2, 0, 1).reshape(8, -1), 4)[0].reshape(u.shape[0], n // 8).contiguous()
    return {"qweight": pack(q.T), "qzeros": pack(z.T), "scales": s.T.contiguous().half()}, dense


def packed(w, group=32, sym=True, bits=4):
    n, k = w.shape
    q, s, z, _, dense = grid(w, bits, group, sym, scale_type=torch.bfloat16)
    out = {"weight_packed": pack_bits(q.T.numpy(), bits).T.contiguous(), "weight_scale": s.bfloat16(),
           "weight_shape": torch.tensor([n, k])}
    if not sym:
        out["weight_zero_point"] = pack_bits(z.numpy(), bits)
    return out, dense


def fp8(w, kind):
    n, k = w.shape
    if kind == "tensor":
        s = (w.abs().max() / 448).float()
        each = s
    elif kind == "channel":
        s = (w.abs().amax(1, keepdim=True) / 448).bfloat16()
        each = s.float()
    else:  # blocks of 32 x 64
        s = (w.reshape(n // 32, 32, -1, 64).abs().amax((1, 3)) / 448).float()
        each = s.repeat_interleave(32, 0).repeat_interleave(64, 1)
    q = (w / each).to(torch.float8_e4m3fn)
    return {"weight": q, "weight_scale_inv" if kind == "block" else "weight_scale": s}, q.float() * each


def int8(w):
    s = (w.abs().amax(1, keepdim=True) / 127).float()
    q = (w / s).round().clamp(-128, 127)
    return {"weight": q.to(torch.int8), "weight_scale": s}, q * s


def llm_int8(w):
    s = w.abs().amax(1).float()
    q = (w / s[:, None] * 127).round()
    return {"weight": q.to(torch.int8), "SCB": s, "weight_format": torch.tensor(0, dtype=torch.uint8)}, \
        q * (s[:, None] / 127)


def scheme(bits, kind="int", **more):
    return {"quant_method": "compressed-tensors", "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind, **more}}}}


FORMATS = {
    "gptq4": (lambda w: gptq(w), {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}),
    "gptq4-order": (lambda w: gptq(w, sym=False, act_order=True),
                    {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True}),
    "gptq4-v2": (lambda w: gptq(w, sym=False, v2=True),
                 {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"}),
    "gptq3": (lambda w: gptq(w, bits=3, group=64, sym=False),
              {"quant_method": "gptq", "bits": 3, "group_size": 64, "sym": False}),
    "gptq2": (lambda w: gptq(w, bits=2, sym=False), {"quant_method": "gptq", "bits": 2, "group_size": 32, "sym": False}),
    "gptq8": (lambda w: gptq(w, bits=8, group=w.shape[1]),
              {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True}),
    "gptq8-asym": (lambda w: gptq(w, bits=8, sym=False), {"quant_method": "gptq", "bits": 8, "group_size": 32}),
    "awq": (lambda w: awq(w), {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm",
                               "zero_point": True}),
    "w4a16": (lambda w: packed(w), scheme(4, group_size=32, symmetric=True, strategy="group")),
    "w4a16-asym": (lambda w: packed(w, group=w.shape[1], sym=False), scheme(4, symmetric=False, strategy="channel")),
    "w8a16": (lambda w: packed(w, bits=8), scheme(8, group_size=32, symmetric=True, strategy="group")),
    "fp8-tensor": (lambda w: fp8(w, "tensor"), {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8-channel": (lambda w: fp8(w, "channel"), scheme(8, "float", strategy="channel", symmetric=True)),
    "fp8-block": (lambda w: fp8(w, "block"), {"quant_method": "fp8", "weight_block_size": [32, 64]}),
    "int8": (lambda w: int8(w), scheme(8, strategy="channel", symmetric=True)),
    "llm-int8": (lambda w: llm_int8(w), {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}


def quant():
    t = transformers
    folder = f"{DIR}/quant"
    os.makedirs(folder, exist_ok=True)
    model = randomize(t.LlamaForCausalLM(t.LlamaConfig(**QCONFIG)), 7).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.half().float())
    dense = {n: m.weight.data.clone() for n, m in linears(model).items()}
    config = json.loads(model.config.to_json_string(use_diff=False))
    config = {k: config[k] for k in QCONFIG if k in config} | {
        "model_type": "llama", "rope_parameters": config["rope_parameters"]}
    write_json(f"{folder}/config.json", config)
    rest = {n: p.data.half().contiguous() for n, p in model.named_parameters() if not n.startswith("lm_head")
            and n[:-len(".weight")] not in dense}
    save_file(rest, f"{folder}/rest.safetensors")
    refs = {}
    for name, (make, settings) in FORMATS.items():
        tensors = {}
        for n, w in dense.items():
            parts, meant = make(w)
            linears(model)[n].weight.data.copy_(meant)
            tensors |= {f"{n}.{role}": x.contiguous() for role, x in parts.items()}
        save_file(tensors, f"{folder}/{name}.safetensors")
        refs[name] = {"settings": settings, **logits_of(model), "rows": [ROWS[-1]]}
        refs[name]["logits"] = refs[name]["logits"][-1:]
        print(name)
    write_json(f"{DIR}/ref/quant.json", refs)


# ---- tokenizers ----

TEXTS = [
    "Hello world! It's 2024, isn't it? I'll say 12345 things; we've 3.14 of them.",
    "  leading and   inner    spaces\tand\ttabs \n\n\nnew lines \r\n end  ",
    "def f(x):\n    return x**2 + 1  # comment\n\nclass A:\n\tpass\n",
    "Zażółć gęślą jaźń. Ünïcödé cafe\u0301 naïve Ångström A\u030angstro\u0308m",
    "日本語のテキスト、中文文本和한국어 텍스트 สวัสดี שלום مرحبا हिन्दी",
    "emoji 🙂👍🏽👨‍👩‍👧‍👦 flags 🇩🇪 math ∑∫√ ﬁ ﬂ ½ ² Ⅷ ℌ ①",
    "", " ", "\n", "a", "\u2581", "a\u2581b", "\u00a0nbsp\u3000wide\u200bzero", "I\u0307İSTANBUL ẞ ΑΣ ς",
    "t<s>hi</s> <|x|>  spaced <|x|>\n<mask>  after <tool>a<tool>b x<word>y <word> z",
    "x" * 50 + "1" * 30 + "!" * 20, "ᄀᄁ가각 क्षि ঽ \U0001F1E6 \ufffd \x07\x1b",
]


def corpus():
    text = open("tests/data/ref/gpl3.txt").read()
    return text.split("\n") + TEXTS * 3


SPECIAL = [("<unk>", True, {}), ("<s>", True, {}), ("</s>", True, {}), ("<|x|>", True, {"rstrip": True}),
           ("<mask>", True, {"lstrip": True}), ("<tool>", False, {}), ("<word>", False, {"single_word": True})]


def tokenizers():
    import tokenizers as tk
    from tokenizers import decoders, models as md, normalizers as no, pre_tokenizers as pt, processors, trainers

    qwen = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|"
            r"\s+")
    llama3 = qwen.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
    own = r"\p{Lu}+(?=\p{Lu}\p{Ll})|\p{Lu}?\p{Ll}+|\p{N}{2}|[^\S\r\n]+|\R|."
    byte = pt.ByteLevel(add_prefix_space=False, use_regex=False)
    split = lambda p, how="isolated", **kw: pt.Split(tk.Regex(p), how, **kw)  # noqa: E731
    chars = sorted({c for line in corpus()[:200] for c in line})[:90]
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    bpe = lambda **kw: md.BPE(**kw)  # noqa: E731
    kinds = {
        "gpt2": (bpe(), None, pt.ByteLevel(add_prefix_space=False), decoders.ByteLevel(), "bytes"),
        "gpt2-prefix": (bpe(), None, pt.ByteLevel(add_prefix_space=True), decoders.ByteLevel(), "bytes"),
        "smollm": (bpe(), None, pt.Sequence([pt.Digits(True), pt.ByteLevel(add_prefix_space=False)]),
                   decoders.ByteLevel(), "bytes"),
        "qwen2": (bpe(), no.NFC(), pt.Sequence([split(qwen), byte]), decoders.ByteLevel(), "bytes"),
        "llama3": (bpe(ignore_merges=True), None, pt.Sequence([split(llama3), byte]), decoders.ByteLevel(), "bytes"),
        "own": (bpe(), no.Sequence([no.NFKC(), no.Lowercase()]),
                pt.Sequence([split(own), pt.Punctuation("contiguous"), byte]), decoders.ByteLevel(), "bytes"),
        "splits": (bpe(), no.NFKD(), pt.Sequence([
            split(r"\d", "merged_with_previous"), split(r"[aeiou]", "merged_with_next"), split(r"\s", "contiguous"),
            split(r"[!-~]+", "isolated", invert=True), byte]), decoders.ByteLevel(), "bytes"),
        "spm": (bpe(byte_fallback=True, fuse_unk=True, unk_token="<unk>"),
                no.Sequence([no.Prepend("▁"), no.Replace(" ", "▁")]), None,
                decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                   decoders.Strip(" ", 1, 0)]), "fallback"),
        "metaspace": (bpe(fuse_unk=True, unk_token="<unk>"), no.NFC(), pt.Metaspace(prepend_scheme="first", split=True),
                      decoders.Metaspace(prepend_scheme="first"), "plain"),
        "gemma": (bpe(byte_fallback=True, fuse_unk=True, unk_token="<unk>"), no.Replace(" ", "▁"),
                  pt.Split(" ", "merged_with_previous"),
                  decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]), "fallback"),
        "words": (bpe(unk_token="<unk>"), no.Sequence([no.NFD(), no.StripAccents(), no.Strip()]),
                  pt.Sequence([pt.Whitespace(), pt.Digits(False)]), None, "plain"),
        "unigram": (md.Unigram(), no.Sequence([no.NFKC(), no.Replace(tk.Regex(" {2,}"), " ")]),
                    pt.Metaspace(prepend_scheme="always"), decoders.Metaspace(), "unigram"),
        "unigram-map": (md.Unigram(), "nmt_nfkc", pt.Sequence([pt.WhitespaceSplit(), pt.Metaspace()]),
                        decoders.Metaspace(), "unigram"),
    }
    refs = {}
    for name, (model, normal, pre, decoder, how) in kinds.items():
        t = tk.Tokenizer(model)
        if normal == "nmt_nfkc":
            normal = sentencepiece_rules(tk)
        if normal:
            t.normalizer = normal
        if pre:
            t.pre_tokenizer = pre
        if decoder:
            t.decoder = decoder
        names = [c for c, _, _ in SPECIAL]
        if how == "unigram":
            trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=names[:3], unk_token="<unk>",
                                              show_progress=False)
        else:
            alphabet = pt.ByteLevel.alphabet() if how == "bytes" else chars
            extra = byte_tokens if how == "fallback" else []
            trainer = trainers.BpeTrainer(vocab_size=420 + len(extra), special_tokens=names[:3] + extra,
                                          initial_alphabet=alphabet, limit_alphabet=256 if how == "bytes" else 120,
                                          show_progress=False)
        t.train_from_iterator(corpus(), trainer)
        t.add_tokens([tk.AddedToken(c, normalized=False, **kw) for c, special, kw in SPECIAL if not special])
        t.add_special_tokens([tk.AddedToken(c, normalized=False, **kw) for c, special, kw in SPECIAL[3:] if special])
        t.post_processor = processors.TemplateProcessing(single="<s> $A" + (" </s>" if name == "unigram" else ""),
                                                         special_tokens=[("<s>", 1), ("</s>", 2)])
        j = json.loads(t.to_str())
        if how == "fallback":  # byte tokens are part of the model, not names
            j["added_tokens"] = [a for a in j["added_tokens"] if not a["content"].startswith("<0x")]
        write_json(f"{DIR}/tokenizers/{name}.json", j)
        t = tk.Tokenizer.from_file(f"{DIR}/tokenizers/{name}.json")
        refs[name] = [[x, t.encode(x).ids, t.decode(t.encode(x).ids)] for x in TEXTS]
        print(name, t.get_vocab_size())
    write_json(f"{DIR}/ref/tokenizers.json", refs)


def sentencepiece_rules(tk):
    """A few rules, compiled by SentencePiece (its own nmt_nfkc take 300 kB)."""
    import io
    import tempfile
    import sentencepiece as sp
    from sentencepiece import sentencepiece_model_pb2 as pb
    rules = tempfile.NamedTemporaryFile("w", suffix=".tsv")
    for a, b in [("\ufb01", "fi"), ("\u00a0", " "), ("\u3000", " "), ("e\u0301", "é"), ("\u200b", ""), ("①", "1"),
                 ("½", "1/2"), ("日本", "jp"), ("\t", " "), ("\n", " "), ("ab", "c"), ("\U0001f642", ":)"), ("o\u0308", "ö")]:
        rules.write(" ".join(f"{ord(c):X}" for c in a) + "\t" + " ".join(f"{ord(c):X}" for c in b) + "\n")
    rules.flush()
    out = io.BytesIO()
    sp.SentencePieceTrainer.train(sentence_iterator=iter(corpus()), model_writer=out, vocab_size=200, model_type="unigram",
                                  hard_vocab_limit=False, minloglevel=3,
                                  normalization_rule_tsv=rules.name)
    m = pb.ModelProto()
    m.ParseFromString(out.getvalue())
    return tk.normalizers.Precompiled(m.normalizer_spec.precompiled_charsmap)


# ---- a real model ----

def real():
    """SmolLM2's GGUF file as a folder of F16 weights: ~/.cache/llmrun/smollm2-hf. For comparing by hand."""
    import gguf
    home = os.path.expanduser("~/.cache/llmrun")
    r = gguf.GGUFReader(home + "/SmolLM2-135M-Instruct.Q4_1.gguf")
    get = lambda k: r.fields[k].contents()  # noqa: E731
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "attn_norm": "input_layernorm",
             "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
             "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
             "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
    heads = {"attn_q": get("llama.attention.head_count"), "attn_k": get("llama.attention.head_count_kv")}
    tensors = {}
    for t in r.tensors:
        parts = t.name.split(".")
        module = parts[-2]
        w = gguf.dequantize(t.data, t.tensor_type).reshape(tuple(reversed([int(x) for x in t.shape])))
        if module in heads:  # back from neighbouring pairs to halves
            h = heads[module]
            w = w.reshape(h, w.shape[0] // h // 2, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)
        prefix = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
        tensors[prefix + names[module] + ".weight"] = torch.from_numpy(np.ascontiguousarray(w)).half()
    folder = home + "/smollm2-hf"
    os.makedirs(folder, exist_ok=True)
    save_file(tensors, folder + "/model.safetensors")
    write_json(folder + "/config.json", {
        "model_type": "llama", "hidden_size": get("llama.embedding_length"), "vocab_size": get("llama.vocab_size"),
        "num_hidden_layers": get("llama.block_count"), "num_attention_heads": heads["attn_q"],
        "num_key_value_heads": heads["attn_k"], "intermediate_size": get("llama.feed_forward_length"),
        "max_position_embeddings": get("llama.context_length"), "rope_theta": get("llama.rope.freq_base"),
        "rms_norm_eps": get("llama.attention.layer_norm_rms_epsilon"), "tie_word_embeddings": True,
        "bos_token_id": get("tokenizer.ggml.bos_token_id"), "eos_token_id": get("tokenizer.ggml.eos_token_id")})
    tokens, types = get("tokenizer.ggml.tokens"), get("tokenizer.ggml.token_type")
    write_json(folder + "/tokenizer.json", {
        "added_tokens": [{"id": i, "content": x, "special": True} for i, x in enumerate(tokens) if types[i] == 3],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "add_prefix_space": False}]},
        "model": {"type": "BPE", "vocab": {x: i for i, x in enumerate(tokens)}, "merges": get("tokenizer.ggml.merges")}})
    write_json(folder + "/tokenizer_config.json", {"chat_template": get("tokenizer.chat_template")})



def main():
    what = WHAT or ["models", "quant", "tokenizers"]
    for name in what:
        globals()[name]()


if __name__ == "__main__":
    main()
