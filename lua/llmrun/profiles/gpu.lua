--- Profiles of NVIDIA GPUs, from published figures: nothing here was measured by us. FP8 weights and KV.
---
--- A step is bound by reading weights and KV, or by arithmetic, and 1.4 ms of it by neither. What share of the data
--- sheet's figures is reached was fitted to the throughputs that TensorRT-LLM's performance overview gives for ten
--- lengths of prompts and outputs (`tests/bench/simulate_published.lua` repeats the comparison); the step's own time
--- follows from what a token takes at one request.

local machines = {
    h100 = {
        name = "NVIDIA H100 SXM", memory = 80e9, bandwidth = 3.35e12, flops = 1979e12,
        source = "NVIDIA H100 data sheet: 80 GB, 3.35 TB/s, 1979 TFLOPS of dense FP8, NVLink 900 GB/s in all",
    },
    h200 = {
        name = "NVIDIA H200 SXM", memory = 141e9, bandwidth = 4.8e12, flops = 1979e12,
        source = "NVIDIA H200 data sheet: 141 GB, 4.8 TB/s, 1979 TFLOPS of dense FP8, NVLink 900 GB/s in all",
    },
}

local models = {
    ["8b"] = {
        name = "Llama 3.1 8B, FP8", parameters = 8.03e9, weight_bytes = 9.08e9, layers = 32, width = 4096, heads = 32,
        head_dim = 128, kv_heads = 8, context = 131072,
    },
    ["70b"] = {
        name = "Llama 3.1 70B, FP8", parameters = 70.6e9, weight_bytes = 72.7e9, layers = 80, width = 8192, heads = 64,
        head_dim = 128, kv_heads = 8, context = 131072,
    },
}

-- Mean absolute error against the overview's throughputs, by profile (tests/bench/simulate_published.lua).
local errors = { ["h100-8b"] = 0.073, ["h200-8b"] = 0.041, ["h100-70b"] = 0.042, ["h200-70b"] = 0.085 }

local RESERVE = 0.07 -- of a GPU's memory: activations, graphs, the CUDA context

return function(machine, model)
    local m, w = machines[machine], models[model]
    local name = machine .. "-" .. model
    return {
        format = "llmrun-profile-1", name = name,
        source = "roofline of data sheets, its efficiencies fitted to published throughputs",
        sources = {
            machine = m.source,
            model = "arXiv:2407.21783 (Llama 3): layers, widths, heads; linear layers in FP8, embedding, head in BF16",
            efficiency = "TensorRT-LLM, docs/source/performance/perf-overview.md at commit 00f3768: Llama 3.1 8B and "
                .. "Llama 3.3 70B, FP8, H100 and H200, throughput under maximum load",
            step = "NVIDIA NIM for LLMs, performance page, Llama 3.1 8B 1.8.0: 4.63 ms a token at one request",
            links = "8 us an exchange and 300 GB/s of NVLink's 450 one way: assumed, see src/dist/README.md; "
                .. "InfiniBand NDR between stages, 400 Gbit/s, 40 GB/s of it reached: assumed",
            swap = "PCIe 5.0 x16, 50 GB/s of 64 reached: assumed",
        },
        model = w, machine = { name = m.name }, tp = model == "70b" and machine == "h100" and 2 or 1,
        step = {
            kind = "roofline", flops = 0.57 * m.flops, attention_flops = 0.48 * m.flops,
            bandwidth = 0.87 * m.bandwidth, step = 1.4e-3, sequence = 0, token = 0,
        },
        links = {
            tp = { latency = 8e-6, bandwidth = 300e9 }, pp = { latency = 1e-5, bandwidth = 40e9 },
            -- two all-reduces in 16 bits, each a reduce-scatter and a gather
            exchanges = { layer = 2, bytes = 2 * 2 * 2 * w.width },
        },
        kv = {
            bytes_per_token = 2 * w.layers * w.kv_heads * w.head_dim, memory = m.memory, reserve = RESERVE * m.memory,
            swap_bandwidth = 50e9,
        },
        engine = { max_batch_tokens = 8192, max_seqs = 1024, block_size = 16 },
        error = { mean_abs = errors[name], of = "throughput, against the published table" },
    }
end
