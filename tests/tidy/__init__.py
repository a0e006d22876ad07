"""Tidy: what the sources look like. Reads them as text and syntax trees; runs nothing of them."""
