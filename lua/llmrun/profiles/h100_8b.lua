return require("llmrun.profiles.gpu")("h100", "8b")
