"""TODO replay"""
