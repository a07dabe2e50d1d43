"""Centering: convolutions read channels that hardly vary without their mean, which their bias adds again."""
