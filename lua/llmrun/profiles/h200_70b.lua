return require("llmrun.profiles.gpu")("h200", "70b")
