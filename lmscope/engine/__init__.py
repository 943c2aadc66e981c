"""The scheduler's side: requests, queues, blocks, and the thread that steps them."""
