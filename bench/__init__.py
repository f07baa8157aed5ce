"""Benches of this project beside its peers; each room has a README line in bench/README.md."""
