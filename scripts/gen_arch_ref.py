#!/usr/bin/env python3
"""Writes tests/data/arch/*.json: for each architecture a tiny model's description and what Transformers computes with it.

Usage: python3 scripts/gen_arch_ref.py [NAME ...]   (from the repository root; needs torch, transformers, gguf, numpy)

Weights are not in the files: both sides make them from the tensor's name with the generator `values` (in Lua:
tests/spec/arch_support.lua), so a file holds only metadata keys, shapes and results. The names and the layout are those of
GGUF files; the mapping to Transformers' parameters is written out here, and keys and names are checked against the lists of
the package gguf.

A file: keys [name, type, value], tensors [name, shape (values a row first), scale, offset], prompt (token ids), at
(positions, from 0), logits (one list a position), greedy (ids after the prompt), margin (the smallest distance of the best
two logits on the way), ctx (if the model is to be loaded for a context of its own), f32 in everything.
"""
import json
import math
import os
import usage

if __name__ == "__main__":
    WANTED, = usage.arguments("[CASE...]")

import gguf  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

DIR = "tests/data/arch"
WIDTH, FF, HEADS, KV, DIM, VOCAB = 64, 96, 4, 2, 16, 96
torch.set_grad_enabled(False)


def values(name, n, scale, offset):
    """n float32 values in offset +- scale: a hash of the name's FNV-1a and the number of each."""
    seed = 0x811C9DC5
    for c in name.encode():
        seed = (seed ^ c) * 0x01000193 & 0xFFFFFFFF
    x = (np.arange(n, dtype=np.uint64) * 0x9E3779B1 + seed) & 0xFFFFFFFF
    x = ((x ^ x >> 16) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ x >> 13) * 0xC2B2AE35) & 0xFFFFFFFF
    x ^= x >> 16
    return ((x.astype(np.float64) / 2147483648.0 - 1.0) * scale + offset).astype(np.float32)


class Case:
    """A model being described: tensors of the file on one side, parameters of the Transformers model on the other."""

    def __init__(self, arch, model, layers):
        self.arch, self.model, self.layers = arch, model, layers
        self.keys, self.tensors = [], []
        self.params = dict(model.named_parameters()) | dict(model.named_buffers())
        self.left = {k for k, _ in model.named_parameters()}
        self.extra = {}
        self.key("block_count", "u32", layers)

    def key(self, name, kind, value):
        self.keys.append([f"{self.arch}.{name}", kind, value])

    def tensor(self, name, shape, scale=None, offset=0.0):
        """A new tensor of the file, as an array with the slowest dimension first."""
        if scale is None:
            scale = 2.0 / math.sqrt(shape[-1])
        self.tensors.append([name, list(reversed(shape)), scale, offset])
        return values(name, int(np.prod(shape)), scale, offset).reshape(shape)

    def put(self, param, array):
        p = self.params[param]
        assert tuple(p.shape) == array.shape, (param, tuple(p.shape), array.shape)
        p.copy_(torch.from_numpy(np.ascontiguousarray(array)))
        self.left.discard(param)

    def same(self, name, param, **kw):
        self.put(param, self.tensor(name, tuple(self.params[param].shape), **kw))

    def norm(self, name, param, plus1=False):
        a = self.tensor(name, tuple(self.params[param].shape), scale=0.3, offset=1.0)
        self.put(param, a - 1 if plus1 else a)

    def permuted(self, name, param, heads):
        """Rows of the file turn as neighbouring pairs, Transformers' as halves."""
        n, k = self.params[param].shape
        a = self.tensor(name, (n, k))
        self.put(param, a.reshape(heads, n // heads // 2, 2, k).swapaxes(1, 2).reshape(n, k))

    def transposed(self, name, param):
        k, n = self.params[param].shape
        self.put(param, self.tensor(name, (n, k)).T)


def hf(cls, config, **kw):
    config = config(**kw)
    config._attn_implementation = "eager"
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"
    return cls(config).float().eval()


def base(layers=2, **kw):
    return dict(
        hidden_size=WIDTH, intermediate_size=FF, num_hidden_layers=layers, num_attention_heads=HEADS,
        num_key_value_heads=KV, vocab_size=VOCAB, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, tie_word_embeddings=False) | kw


def usual_keys(c, dim=DIM, kv=KV, ff=FF, ctx=64, eps=1e-5, rope=10000.0):
    c.key("context_length", "u32", ctx)
    c.key("embedding_length", "u32", WIDTH)
    c.key("feed_forward_length", "u32", ff)
    c.key("attention.head_count", "u32", HEADS)
    c.key("attention.head_count_kv", "u32", kv)
    c.key("attention.layer_norm_rms_epsilon", "f32", eps)
    if dim != WIDTH // HEADS:
        c.key("attention.key_length", "u32", dim)
        c.key("attention.value_length", "u32", dim)
    if rope:
        c.key("rope.freq_base", "f32", rope)


def ends(c, tied=False, plus1=False):
    c.same("token_embd.weight", "model.embed_tokens.weight", scale=0.2 if tied else 1.0)
    c.norm("output_norm.weight", "model.norm.weight", plus1)
    if tied:
        c.left.discard("lm_head.weight")
    else:
        c.same("output.weight", "lm_head.weight")


def attention(c, b, p, permute=False, bias=False, norms=False, plus1=False):
    for n, heads in (("q", HEADS), ("k", KV), ("v", 0)):
        name, param = f"{b}attn_{n}", f"{p}self_attn.{n}_proj"
        if permute and heads:
            c.permuted(name + ".weight", param + ".weight", heads)
        else:
            c.same(name + ".weight", param + ".weight")
        if bias:
            c.same(name + ".bias", param + ".bias", scale=0.5)
        if norms and heads:
            c.norm(name + "_norm.weight", f"{p}self_attn.{n}_norm.weight", plus1)
    c.same(b + "attn_output.weight", p + "self_attn.o_proj.weight")


def dense(c, b, p, mlp="mlp."):
    for n in ("gate", "up", "down"):
        c.same(f"{b}ffn_{n}.weight", f"{p}{mlp}{n}_proj.weight")


def blocks(c):
    for i in range(c.layers):
        yield i, f"blk.{i}.", f"model.layers.{i}."


def plain(arch, cls, config, permute=False, bias=False, norms=False, keys=(), layers=2, rope=10000.0, ctx=64, dim=DIM,
          **kw):
    """Llama and what differs from it in details only."""
    kw.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": rope})
    c = Case(arch, hf(cls, config, **base(layers, rms_norm_eps=1e-5, **kw | dict(max_position_embeddings=ctx))), layers)
    usual_keys(c, dim=dim, rope=rope, ctx=ctx)
    for k in keys:
        c.key(*k)
    ends(c)
    for _, b, p in blocks(c):
        c.norm(b + "attn_norm.weight", p + "input_layernorm.weight")
        c.norm(b + "ffn_norm.weight", p + "post_attention_layernorm.weight")
        attention(c, b, p, permute, bias, norms)
        dense(c, b, p)
    return c


def llama(**kw):
    return plain("llama", transformers.LlamaForCausalLM, transformers.LlamaConfig, permute=True, **kw)


def llama_scaled(kind, params, keys, ctx=64):
    return llama(layers=1, ctx=ctx, rope_parameters={"rope_type": kind, "rope_theta": 10000.0} | params,
                 keys=[["rope.scaling.type", "str", kind]] + [["rope.scaling." + k, t, v] for k, t, v in keys])


def llama_dynamic():
    """Transformers takes the base of the length at hand, llmrun that of the context: equal at 40 tokens, in one pass."""
    c = llama_scaled("dynamic", {"factor": 2.0}, [["factor", "f32", 2.0], ["original_context_length", "u32", 16]], 16)
    [k for k in c.keys if k[0] == "llama.context_length"][0][2] = 64
    c.extra |= {"ctx": 40, "prompt_len": 40, "greedy_len": 0}
    return c


def gemma(arch, cls, config, norms, layers, keys, **kw):
    c = Case(arch, hf(cls, config, **base(layers, rms_norm_eps=1e-6, head_dim=32, hidden_activation="gelu_pytorch_tanh",
                                          sliding_window=7, **kw | dict(tie_word_embeddings=True))), layers)
    usual_keys(c, dim=32, eps=1e-6, rope=None)
    c.key("attention.sliding_window", "u32", 7)
    for k in keys:
        c.key(*k)
    ends(c, tied=True, plus1=True)
    for _, b, p in blocks(c):
        for name, param in (("attn_norm", "input_layernorm"), ("post_attention_norm", "post_attention_layernorm"),
                            ("ffn_norm", "pre_feedforward_layernorm"), ("post_ffw_norm", "post_feedforward_layernorm")):
            c.norm(f"{b}{name}.weight", f"{p}{param}.weight", plus1=True)
        attention(c, b, p, norms=norms, plus1=True)
        dense(c, b, p)
    return c


def gemma2():
    return gemma("gemma2", transformers.Gemma2ForCausalLM, transformers.Gemma2Config, False, 2,
                 [["attn_logit_softcapping", "f32", 5.0], ["final_logit_softcapping", "f32", 3.0]],
                 query_pre_attn_scalar=32, attn_logit_softcapping=5.0, final_logit_softcapping=3.0,
                 rope_parameters={"rope_type": "default", "rope_theta": 10000.0})


def gemma3():
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    return gemma("gemma3", transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig, True, 6,
                 [["rope.freq_base", "f32", 1e6], ["rope.scaling.type", "str", "linear"],
                  ["rope.scaling.factor", "f32", 8.0]],
                 query_pre_attn_scalar=32, layer_types=kinds,
                 rope_parameters={"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                                  "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}})


def olmo2():
    c = Case("olmo2", hf(transformers.Olmo2ForCausalLM, transformers.Olmo2Config, **base(
        rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 500000.0})), 2)
    usual_keys(c, eps=1e-6, rope=500000.0)
    ends(c)
    for _, b, p in blocks(c):
        attention(c, b, p, norms=True)
        c.norm(b + "post_attention_norm.weight", p + "post_attention_layernorm.weight")
        c.norm(b + "post_ffw_norm.weight", p + "post_feedforward_layernorm.weight")
        dense(c, b, p)
    return c


def phi3(ctx, load, window=0):
    """RoPE over 12 of 16 values; long divisors where the context loaded is longer than the original one of 32."""
    long, short = [1.0, 1.5, 2.5, 4.0, 6.5, 9.0], [1.0, 1.05, 1.1, 1.2, 1.35, 1.5]
    scaled = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "long_factor": long,
              "short_factor": short, "original_max_position_embeddings": 32, "factor": ctx / 32}
    c = Case("phi3", hf(transformers.Phi3ForCausalLM, transformers.Phi3Config, **base(
        rms_norm_eps=1e-5, rope_parameters=scaled, sliding_window=window or None,
        **dict(max_position_embeddings=ctx, original_max_position_embeddings=32))), 2)
    usual_keys(c, ctx=ctx)
    c.key("rope.dimension_count", "u32", 12)
    c.key("rope.scaling.original_context_length", "u32", 32)
    c.key("rope.scaling.type", "str", "longrope")
    c.key("rope.scaling.attn_factor", "f32", math.sqrt(1 + math.log(ctx / 32) / math.log(32)))
    if window:
        c.key("attention.sliding_window", "u32", window)
    c.raw = [["rope_factors_long.weight", long], ["rope_factors_short.weight", short]]
    ends(c)
    for _, b, p in blocks(c):
        c.norm(b + "attn_norm.weight", p + "input_layernorm.weight")
        c.norm(b + "ffn_norm.weight", p + "post_attention_layernorm.weight")
        c.same(b + "attn_qkv.weight", p + "self_attn.qkv_proj.weight")
        c.same(b + "attn_output.weight", p + "self_attn.o_proj.weight")
        c.same(b + "ffn_up.weight", p + "mlp.gate_up_proj.weight")
        c.same(b + "ffn_down.weight", p + "mlp.down_proj.weight")
    c.extra["ctx"] = load
    if load > 32:
        c.extra["prompt_len"] = 40  # Transformers chooses by the length at hand
    return c


def gpt2():
    model = hf(transformers.GPT2LMHeadModel, transformers.GPT2Config, n_embd=WIDTH, n_layer=2, n_head=HEADS,
               n_inner=FF, vocab_size=VOCAB, n_positions=64, bos_token_id=1, eos_token_id=2)
    c = Case("gpt2", model, 2)
    for name, kind, value in (("context_length", "u32", 64), ("embedding_length", "u32", WIDTH),
                              ("feed_forward_length", "u32", FF), ("attention.head_count", "u32", HEADS),
                              ("attention.layer_norm_epsilon", "f32", 1e-5)):
        c.key(name, kind, value)
    c.same("token_embd.weight", "transformer.wte.weight", scale=1.0)
    c.same("position_embd.weight", "transformer.wpe.weight", scale=1.0)
    c.left.discard("lm_head.weight")
    def norm(name, param):
        c.norm(name + ".weight", param + ".weight")
        c.same(name + ".bias", param + ".bias", scale=0.2)
    norm("output_norm", "transformer.ln_f")
    for i in range(2):
        b, p = f"blk.{i}.", f"transformer.h.{i}."
        norm(b + "attn_norm", p + "ln_1")
        norm(b + "ffn_norm", p + "ln_2")
        for name, param in (("attn_qkv", "attn.c_attn"), ("attn_output", "attn.c_proj"), ("ffn_up", "mlp.c_fc"),
                            ("ffn_down", "mlp.c_proj")):
            c.transposed(f"{b}{name}.weight", f"{p}{param}.weight")
            c.same(f"{b}{name}.bias", f"{p}{param}.bias", scale=0.2)
    return c


def granite():
    return plain("granite", transformers.GraniteForCausalLM, transformers.GraniteConfig, permute=True,
                 embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.2, logits_scaling=2.0,
                 keys=[["embedding_scale", "f32", 3.0], ["residual_scale", "f32", 0.4], ["attention.scale", "f32", 0.2],
                       ["logit_scale", "f32", 2.0]])


def experts(c, b, p, n, ff, mlp="mlp.", router="gate.weight"):
    """Stacked experts; Transformers keeps gate and up as one, the gate's rows first."""
    c.same(b + "ffn_gate_inp.weight", f"{p}{mlp}{router}", scale=0.5)
    gate = c.tensor(b + "ffn_gate_exps.weight", (n, ff, WIDTH))
    up = c.tensor(b + "ffn_up_exps.weight", (n, ff, WIDTH))
    c.put(f"{p}{mlp}experts.gate_up_proj", np.concatenate([gate, up], axis=1))
    c.same(b + "ffn_down_exps.weight", f"{p}{mlp}experts.down_proj")


def moe(arch, cls, config, n, used, ff=FF, mlp="mlp.", router="gate.weight", permute=False, bias=False, norms=False,
        keys=(), shared=0, **kw):
    kw = base(2, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
              num_experts_per_tok=used) | kw
    c = Case(arch, hf(cls, config, **kw), 2)
    usual_keys(c)
    c.key("expert_count", "u32", n)
    c.key("expert_used_count", "u32", used)
    for k in keys:
        c.key(*k)
    ends(c)
    for _, b, p in blocks(c):
        c.norm(b + "attn_norm.weight", p + "input_layernorm.weight")
        c.norm(b + "ffn_norm.weight", p + "post_attention_layernorm.weight")
        attention(c, b, p, permute, bias, norms)
        experts(c, b, p, n, ff, mlp, router)
        if shared:
            for part in ("gate", "up", "down"):
                c.same(f"{b}ffn_{part}_shexp.weight", f"{p}mlp.shared_expert.{part}_proj.weight")
            a = c.tensor(b + "ffn_gate_inp_shexp.weight", (WIDTH,))
            c.put(p + "mlp.shared_expert_gate.weight", a.reshape(1, WIDTH))
    return c


def mixtral():
    return moe("llama", transformers.MixtralForCausalLM, transformers.MixtralConfig, 4, 2, permute=True,
               num_local_experts=4, sliding_window=None)


def qwen2moe():
    return moe("qwen2moe", transformers.Qwen2MoeForCausalLM, transformers.Qwen2MoeConfig, 6, 3, ff=32, bias=True,
               shared=48, num_experts=6, moe_intermediate_size=32, shared_expert_intermediate_size=48,
               norm_topk_prob=False, keys=[["expert_feed_forward_length", "u32", 32],
                                           ["expert_shared_feed_forward_length", "u32", 48]])


def qwen3moe():
    return moe("qwen3moe", transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig, 8, 2, ff=24, norms=True,
               num_experts=8, moe_intermediate_size=24, norm_topk_prob=True, head_dim=DIM,
               keys=[["expert_feed_forward_length", "u32", 24]])


def granitemoe():
    return moe("granitemoe", transformers.GraniteMoeForCausalLM, transformers.GraniteMoeConfig, 4, 2, permute=True,
               mlp="block_sparse_moe.", router="router.weight", num_local_experts=4, embedding_multiplier=3.0,
               residual_multiplier=0.4, attention_multiplier=0.2, logits_scaling=2.0,
               keys=[["embedding_scale", "f32", 3.0], ["residual_scale", "f32", 0.4], ["attention.scale", "f32", 0.2],
                     ["logit_scale", "f32", 2.0]])


def gpt_oss():
    n, ff = 4, 32
    config = base(2, rms_norm_eps=1e-5, num_local_experts=n, num_experts_per_tok=2, head_dim=32, sliding_window=7,
                  intermediate_size=ff, layer_types=["sliding_attention", "full_attention"],
                  rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "truncate": False,
                                   "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0})
    c = Case("gpt-oss", hf(transformers.GptOssForCausalLM, transformers.GptOssConfig, **config), 2)
    usual_keys(c, dim=32, ff=ff)
    for k in (("attention.sliding_window", "u32", 7), ("expert_count", "u32", n), ("expert_used_count", "u32", 2),
              ("expert_feed_forward_length", "u32", ff), ("rope.scaling.type", "str", "yarn"),
              ("rope.scaling.factor", "f32", 4.0), ("rope.scaling.original_context_length", "u32", 16)):
        c.key(*k)
    ends(c)
    for _, b, p in blocks(c):
        c.norm(b + "attn_norm.weight", p + "input_layernorm.weight")
        c.norm(b + "post_attention_norm.weight", p + "post_attention_layernorm.weight")
        attention(c, b, p, bias=True)
        c.same(b + "attn_output.bias", p + "self_attn.o_proj.bias", scale=0.2)
        c.same(b + "attn_sinks.weight", p + "self_attn.sinks", scale=1.0)
        c.same(b + "ffn_gate_inp.weight", p + "mlp.router.weight", scale=0.5)
        c.same(b + "ffn_gate_inp.bias", p + "mlp.router.bias", scale=0.5)
        # the file: gate and up apart, rows of weights first; Transformers: neighbours, columns. A few values go over
        # the limit of 7.
        gate = c.tensor(b + "ffn_gate_exps.weight", (n, ff, WIDTH), scale=1.0)
        up = c.tensor(b + "ffn_up_exps.weight", (n, ff, WIDTH), scale=1.0)
        c.put(p + "mlp.experts.gate_up_proj",
              np.stack([gate, up], axis=2).reshape(n, 2 * ff, WIDTH).swapaxes(1, 2))
        gate = c.tensor(b + "ffn_gate_exps.bias", (n, ff), scale=0.5)
        up = c.tensor(b + "ffn_up_exps.bias", (n, ff), scale=0.5)
        c.put(p + "mlp.experts.gate_up_proj_bias", np.stack([gate, up], axis=2).reshape(n, 2 * ff))
        c.put(p + "mlp.experts.down_proj", c.tensor(b + "ffn_down_exps.weight", (n, WIDTH, ff), 0.1).swapaxes(1, 2))
        c.same(b + "ffn_down_exps.bias", p + "mlp.experts.down_proj_bias", scale=0.2)
    return c


def deepseek(v3):
    """Expanded latent attention; V3 with compressed queries, sigmoid routing in groups and yarn, V2 as V2-Lite is."""
    rank, nope, rot, value, n, ff = 32, 16, 8, 12, 8, 32
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if v3:
        rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
                "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
    config = base(2, num_key_value_heads=HEADS, rms_norm_eps=1e-6, rope_parameters=rope, moe_intermediate_size=ff,
                  n_routed_experts=n, num_experts_per_tok=3, n_shared_experts=2, first_k_dense_replace=1,
                  kv_lora_rank=rank, qk_nope_head_dim=nope, qk_rope_head_dim=rot, v_head_dim=value,
                  q_lora_rank=24 if v3 else None, routed_scaling_factor=1.5 if v3 else 1.0, norm_topk_prob=v3,
                  n_group=4 if v3 else 1, topk_group=2 if v3 else 1)
    if v3:
        model = hf(transformers.DeepseekV3ForCausalLM, transformers.DeepseekV3Config, **config)
    else:
        model = hf(transformers.DeepseekV2ForCausalLM, transformers.DeepseekV2Config, topk_method="greedy", **config)
    c = Case("deepseek2", model, 2)
    usual_keys(c, kv=HEADS, eps=1e-6)
    for k in (("attention.key_length", "u32", nope + rot), ("attention.value_length", "u32", value),
              ("attention.kv_lora_rank", "u32", rank), ("rope.dimension_count", "u32", rot),
              ("expert_count", "u32", n), ("expert_used_count", "u32", 3), ("expert_feed_forward_length", "u32", ff),
              ("expert_shared_count", "u32", 2), ("leading_dense_block_count", "u32", 1),
              ("expert_weights_scale", "f32", 1.5 if v3 else 1.0), ("expert_weights_norm", "bool", v3),
              ("expert_gating_func", "u32", 2 if v3 else 1)):
        c.key(*k)
    if v3:
        for k in (("attention.q_lora_rank", "u32", 24), ("expert_group_count", "u32", 4),
                  ("expert_group_used_count", "u32", 2), ("rope.scaling.type", "str", "yarn"),
                  ("rope.scaling.factor", "f32", 4.0), ("rope.scaling.original_context_length", "u32", 16),
                  ("rope.scaling.yarn_log_multiplier", "f32", 0.1)):
            c.key(*k)
    ends(c)
    for i, b, p in blocks(c):
        c.norm(b + "attn_norm.weight", p + "input_layernorm.weight")
        c.norm(b + "ffn_norm.weight", p + "post_attention_layernorm.weight")
        if v3:
            c.same(b + "attn_q_a.weight", p + "self_attn.q_a_proj.weight")
            c.norm(b + "attn_q_a_norm.weight", p + "self_attn.q_a_layernorm.weight")
            c.same(b + "attn_q_b.weight", p + "self_attn.q_b_proj.weight")
        else:
            c.same(b + "attn_q.weight", p + "self_attn.q_proj.weight")
        c.same(b + "attn_kv_a_mqa.weight", p + "self_attn.kv_a_proj_with_mqa.weight")
        c.norm(b + "attn_kv_a_norm.weight", p + "self_attn.kv_a_layernorm.weight")
        c.same(b + "attn_kv_b.weight", p + "self_attn.kv_b_proj.weight")
        c.same(b + "attn_output.weight", p + "self_attn.o_proj.weight")
        if i == 0:
            dense(c, b, p)
            continue
        experts(c, b, p, n, ff)
        if v3:
            c.put(p + "mlp.gate.e_score_correction_bias", c.tensor(b + "exp_probs_b.bias", (n,), 0.3, 0.4))
        for part in ("gate", "up", "down"):
            c.same(f"{b}ffn_{part}_shexp.weight", f"{p}mlp.shared_experts.{part}_proj.weight")
    return c


YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
CASES = {
    "llama": lambda: llama(),
    "llama_linear": lambda: llama_scaled("linear", {"factor": 4.0}, [["factor", "f32", 4.0]]),
    "llama_dynamic": llama_dynamic,
    "llama_yarn": lambda: llama_scaled("yarn", YARN, [["factor", "f32", 4.0],
                                                      ["original_context_length", "u32", 16]]),
    "llama_llama3": lambda: llama_scaled(
        "llama3", {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 32},
        [["factor", "f32", 4.0], ["low_freq_factor", "f32", 1.0], ["high_freq_factor", "f32", 4.0],
         ["original_context_length", "u32", 32]]),
    "mistral": lambda: plain("llama", transformers.MistralForCausalLM, transformers.MistralConfig, permute=True,
                             sliding_window=9, head_dim=32, dim=32, rope=1e6,
                             keys=[["attention.sliding_window", "u32", 9]]),
    "qwen2": lambda: plain("qwen2", transformers.Qwen2ForCausalLM, transformers.Qwen2Config, bias=True),
    "qwen3": lambda: plain("qwen3", transformers.Qwen3ForCausalLM, transformers.Qwen3Config, norms=True, head_dim=32,
                           dim=32),
    "gemma2": gemma2,
    "gemma3": gemma3,
    "olmo2": olmo2,
    "phi3_short": lambda: phi3(128, 32),
    "phi3_long": lambda: phi3(128, 128, window=11),
    "gpt2": gpt2,
    "granite": granite,
    "smollm3": lambda: plain("smollm3", transformers.SmolLM3ForCausalLM, transformers.SmolLM3Config, permute=True,
                             layers=4, rope=5e6, use_sliding_window=False),
    "mixtral": mixtral,
    "qwen2moe": qwen2moe,
    "qwen3moe": qwen3moe,
    "granitemoe": granitemoe,
    "gpt-oss": gpt_oss,
    "deepseek_v2": lambda: deepseek(False),
    "deepseek_v3": lambda: deepseek(True),
}

LORA_MODULES = {
    "llama": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
              "mlp.up_proj", "mlp.down_proj"],
    "qwen2": ["self_attn.q_proj", "mlp.down_proj"],
    "phi3_short": ["self_attn.qkv_proj", "mlp.gate_up_proj"],
}


def lora(base_name):
    """A model with an adapter in its weights: what llmrun computes with the adapter beside them. The adapter's tensors
    are made from their names like the weights, here and in the spec; alpha 12, rank 6."""
    rank, alpha = 6, 12.0
    c = CASES[base_name]()
    modules = []
    for name, p in c.model.named_parameters():
        module = name.removesuffix(".weight")
        if not any(module.endswith(m) for m in LORA_MODULES[base_name]):
            continue
        n, k = p.shape
        a = values(f"{module}.lora_A", rank * k, 0.3, 0.0).reshape(rank, k)
        b = values(f"{module}.lora_B", n * rank, 0.1, 0.0).reshape(n, rank)
        p.add_(torch.from_numpy((alpha / rank * b) @ a))
        modules.append([module, n, k])
    with open(f"{DIR}/{base_name}.json") as f:
        prompt = json.load(f)["prompt"]
    logits = step(c.model, prompt)
    at = [len(prompt) // 2, len(prompt) - 1]
    out = {"base": base_name, "rank": rank, "alpha": alpha, "modules": modules, "at": at,
           "logits": [[round(float(v), 6) for v in logits[i]] for i in at]}
    with open(f"{DIR}/lora_{base_name}.json", "w") as f:
        f.write("{" + ",\n".join(f"{json.dumps(k)}:{json.dumps(v, separators=(',', ':'))}" for k, v in out.items()) + "}\n")
    print(f"lora_{base_name:16} logits {logits.std():.3f}")


# Keys of ours, where GGUF has no name for what a config.json says.
OWN_KEYS = {"rope.scaling.low_freq_factor", "rope.scaling.high_freq_factor"}


def check_names(c):
    known = {v for n in vars(gguf.Keys).values() if isinstance(n, type)
             for v in vars(n).values() if isinstance(v, str)}
    for k, _, _ in c.keys:
        name = k[len(c.arch) + 1:]
        assert "{arch}." + name in known or name in OWN_KEYS, k
    arch = {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[c.arch]
    names = {gguf.TENSOR_NAMES[t] for t in gguf.MODEL_TENSORS[arch]}
    for t in c.tensors:
        name = t[0].rsplit(".", 1)[0]
        parts = name.split(".")
        if parts[0] == "blk":
            name = ".".join(["blk", "{bid}"] + parts[2:])
        assert name in names, (c.arch, t[0])


def step(model, ids):
    return model(torch.tensor([ids]), use_cache=False).logits[0].numpy()


def run(name):
    c = CASES[name]()
    assert not c.left, c.left
    check_names(c)
    n, more = c.extra.pop("prompt_len", 24), c.extra.pop("greedy_len", 8)
    for attempt in range(100):  # greedy tokens are to be beyond doubt
        prompt = [int(v) for v in (values(f"{name}{attempt}", n, 0.5, 0.5) * (VOCAB - 3)).astype(np.int64) + 3]
        ids, margin = list(prompt), 9.0
        while len(ids) < n + more and margin > 4e-3:
            last = step(c.model, ids)[-1]
            best = np.sort(last)[-2:]
            margin = min(margin, float(best[1] - best[0]))
            ids.append(int(last.argmax()))
        if margin > 4e-3:
            break
    assert margin > 4e-3, (name, margin)
    at = [0, n // 2, n - 1]
    logits = step(c.model, prompt)
    out = {"arch": c.arch, "keys": c.keys, "tensors": c.tensors, "raw": getattr(c, "raw", []), "prompt": prompt,
           "at": at, "logits": [[round(float(v), 6) for v in logits[i]] for i in at], "greedy": ids[n:],
           "margin": round(margin, 4)} | c.extra
    with open(f"{DIR}/{name}.json", "w") as f:
        lines = ",\n".join(f"{json.dumps(k)}:{json.dumps(v, separators=(',', ':'))}" for k, v in out.items())
        f.write("{" + lines + "}\n")
    print(f"{name:16} logits {logits.std():.3f} margin {margin:.4f}")


if __name__ == "__main__":
    os.makedirs(DIR, exist_ok=True)
    transformers.logging.set_verbosity_error()
    for case in WANTED or [*CASES, *("lora_" + n for n in LORA_MODULES)]:
        if case.startswith("lora_"):
            lora(case.removeprefix("lora_"))
        else:
            run(case)
