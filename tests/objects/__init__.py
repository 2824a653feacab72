"""Tests of files and objects at URLs."""
