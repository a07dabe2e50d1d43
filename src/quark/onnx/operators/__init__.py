"""The operator library at the import path of scripts written for other versions."""
