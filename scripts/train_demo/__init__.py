"""How the demo model was made: data, network, training, export. Torch is needed here only."""
