"""TODO sequence.rebinding"""
