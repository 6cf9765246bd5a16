"""Mixtures of experts: a router chooses experts for each token, and tokens travel to the ranks that hold them.

router.py    scores, the choice, its balance, and the losses that keep it
dispatch.py  which rows of tokens go to which rank, and the exchange there and back
experts.py   the experts' feed-forward layers, with weights split over `ep` along experts and over `etp` along features
"""
