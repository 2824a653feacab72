"""Tests files and objects at URLs."""
