"""TODO frameworks"""
