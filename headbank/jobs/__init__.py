"""Offline compositions: capture, selection, evaluation."""
