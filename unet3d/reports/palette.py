"""The colours of every picture.

The palette of Okabe and Ito (Color Universal Design, 2008), told apart by colour-blind people.
"""

BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, YELLOW, GREY = "#56B4E9", "#CC79A7", "#F0E442", "#C8C8C8"
