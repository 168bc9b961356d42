"""The report page: one HTML file that draws a tree, its plans and their accounts, without a network."""
