"""The run folder, and what every process of a run does alike: files, signs of life, meetings."""
