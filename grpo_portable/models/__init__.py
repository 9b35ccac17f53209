"""The policy: loaded, adapted, saved, spread over GPUs; and the prompt it sees."""
