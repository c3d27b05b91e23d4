"""TODO sequence"""
