"""The graph we author: tensors with shape and layout, operators, weight slots."""
