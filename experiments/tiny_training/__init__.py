"""What `experiments.train_tiny` is made of: corpus, tokenizer, target, samples, drafter, and the folders they end in."""
