"""Tests with files and objects at URLs."""
