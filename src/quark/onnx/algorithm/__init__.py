"""Import paths of AMD Quark for the torch modules that its finetuning uses."""
