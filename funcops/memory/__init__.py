"""What is kept between forward and backward: policies, forms of kept tensors, recomputing, and the policy that fits."""
