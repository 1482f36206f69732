std = "lua54"
max_line_length = 120
unused_args = false -- callbacks name what they are given
self = false
codes = true
cache = ".cache/luacheck"
exclude_files = { "build*/" }
files["tests/spec"] = { std = "lua54+busted", max_line_length = 180 } -- tables of cases, one a line
files["tests/bench"] = { std = "lua54" }
files["lua/llmrun/cli"] = { globals = { "arg" } } -- a program gets its arguments there, as lua gives them
