"""TODO simulator.calls"""
