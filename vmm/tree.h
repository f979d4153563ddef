/* SPDX-License-Identifier: Apache-2.0
 *
 * An ordered set of spans by (bytes, address): a treap with its nodes inside the spans, so inserting
 * and removing never allocate. Expected cost of each call: log n. No lock of its own.
 */
#ifndef GP__TREE_H
#define GP__TREE_H

#include <stddef.h>
#include <stdint.h>

struct gp__tree_node {
    struct gp__tree_node *left;
    struct gp__tree_node *right;
    size_t bytes; /* key, then va; do not change while inside a tree */
    uintptr_t va;
};

struct gp__tree {
    struct gp__tree_node *root;
};

void gp__tree_insert(struct gp__tree *tree, struct gp__tree_node *node);
/* The node must be in this tree. */
void gp__tree_remove(struct gp__tree *tree, struct gp__tree_node *node);
/* The smallest node whose key is at least (bytes, va), or NULL. */
struct gp__tree_node *gp__tree_at_least(const struct gp__tree *tree, size_t bytes, uintptr_t va);
/* The largest node whose key is below (bytes, va), or NULL. */
struct gp__tree_node *gp__tree_below(const struct gp__tree *tree, size_t bytes, uintptr_t va);

#endif
