"""The parent of a run: workers are started and watched; how one ended decides where the run goes on."""
