std = "lua54"
max_line_length = 120
unused_args = false -- callbacks name what they are given
self = false
codes = true
cache = ".cache/luacheck"
exclude_files = { "build*/" }
files["tests/spec"] = { std = "lua54+busted" }
files["tests/bench"] = { std = "lua54" }
files["lua/llmrun/cli"] = { globals = { "arg" } } -- a program gets its arguments there, as lua gives them
