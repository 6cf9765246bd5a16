"""Mixtures of experts: a router chooses experts for each token, and tokens travel
to the ranks that hold them.

router.py    scores, the choice, its balance, and the losses that keep it
capacity.py  how many rows an expert takes, and which are dropped
dispatch.py  which rows of tokens go to which rank, and the exchange there and back
experts.py   the experts' feed-forward layers, with weights split over `ep` along experts and over `etp` along
             features
"""
