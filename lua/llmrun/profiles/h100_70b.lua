return require("llmrun.profiles.gpu")("h100", "70b")
