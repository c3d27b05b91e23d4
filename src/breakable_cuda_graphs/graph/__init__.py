"""TODO graph"""
