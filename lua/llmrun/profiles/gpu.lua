--- Profiles of NVIDIA GPUs from published figures: nothing here was measured by us. Each figure names its source.

local machines = {
    h100 = { name = "NVIDIA H100 SXM 80 GB", memory = 80e9, bandwidth = 3.35e12, flops = 989.4e12 },
    h200 = { name = "NVIDIA H200 SXM 141 GB", memory = 141e9, bandwidth = 4.8e12, flops = 989.4e12 },
}
local models = {
    ["8b"] = { name = "Llama 3.1 8B", parameters = 8.03e9, weight_bytes = 16.06e9, layers = 32, width = 4096,
        heads = 32, head_dim = 128, kv_heads = 8, context = 131072 },
    ["70b"] = { name = "Llama 3.1 70B", parameters = 70.6e9, weight_bytes = 141.2e9, layers = 80, width = 8192,
        heads = 64, head_dim = 128, kv_heads = 8, context = 131072 },
}

return function(machine, model)
    local m, w = machines[machine], models[model]
    return {
        format = "llmrun-profile-1", name = machine .. "-" .. model,
        source = "TODO", model = w, machine = { name = m.name },
        tp = model == "70b" and 4 or 1,
        step = { kind = "roofline", flops = 0.6 * m.flops, bandwidth = 0.8 * m.bandwidth, step = 5e-4, sequence = 5e-6,
            token = 0 },
        links = {
            tp = { latency = 8e-6, bandwidth = 300e9 }, pp = { latency = 1e-5, bandwidth = 40e9 },
            exchanges = { layer = 2, bytes = 2 * 2 * 2 * w.width },
        },
        kv = {
            bytes_per_token = 2 * w.layers * w.kv_heads * w.head_dim * 2, memory = m.memory,
            reserve = 0.1 * m.memory, swap_bandwidth = 50e9,
        },
        engine = { max_batch_tokens = 2048, max_seqs = 256, block_size = 16 },
    }
end
