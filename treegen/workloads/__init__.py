"""Where trees come from: files, recorded and generated decodings."""
