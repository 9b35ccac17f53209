"""Questions with golds that can be read: from files, the hub, or the built-in generator."""
