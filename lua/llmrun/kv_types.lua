--- Number formats of the KV cache, as flags and options name them; fp8 is one of GPUs only.
return { "f32", "f16", "bf16", "fp8", "q8_0", "q4_0" }
