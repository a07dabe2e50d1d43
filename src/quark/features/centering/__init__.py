"""Centering: convolutions read nearly constant channels with the mean subtracted, and their bias adds it back."""
