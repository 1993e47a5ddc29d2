"""Any model of transformers with `generate()`, in whole padded batches (`engine: generate`)."""
