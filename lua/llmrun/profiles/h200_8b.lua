return require("llmrun.profiles.gpu")("h200", "8b")
