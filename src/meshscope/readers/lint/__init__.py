"""What a compiled program computes wrongly or wastes, proved from its HLO text."""
