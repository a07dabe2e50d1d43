"""Paths that scripts written for AMD's Quark import from."""
