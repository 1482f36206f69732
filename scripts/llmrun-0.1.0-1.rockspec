-- For LuaRocks, from a checkout: luarocks --lua-version 5.4 make scripts/llmrun-0.1.0-1.rockspec
-- Builds the module llmrun.so only; what it is built with: scripts/deps.
rockspec_format = "3.0"
package = "llmrun"
version = "0.1.0-1"
source = { url = "." } -- what stands here is built
description = {
    summary = "LLM inference engine whose decisions are Lua programs",
    detailed = "llm.run(function() ... end) runs a program with models, sessions, samplers and policies.",
    license = "MIT",
}
dependencies = { "lua ~> 5.4" }
build = {
    type = "command",
    build_command = "cmake -S . -B build.luarocks -G Ninja -DCMAKE_BUILD_TYPE=Release -DLLMRUN_TESTS=OFF -DLLMRUN_CUDA=OFF " ..
        "&& cmake --build build.luarocks --target llmrun_module",
    install = { lib = { llmrun = "build.luarocks/llmrun.so" } },
}
