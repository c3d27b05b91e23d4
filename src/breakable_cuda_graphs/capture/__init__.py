"""TODO capture"""
