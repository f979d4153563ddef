/* SPDX-License-Identifier: Apache-2.0
 *
 * The treap of tree.h. A node's priority is a hash of its address key: no state, no random source,
 * and the same shape for the same contents.
 */
#include "tree.h"

#include <stdbool.h>

static uint64_t priority(const struct gp__tree_node *node)
{
    uint64_t x = (uint64_t)node->va * UINT64_C(0x9E3779B97F4A7C15);
    x ^= x >> 29;
    x *= UINT64_C(0xBF58476D1CE4E5B9);
    return x ^ x >> 32;
}

static bool is_below(const struct gp__tree_node *node, size_t bytes, uintptr_t va)
{
    return node->bytes < bytes || (node->bytes == bytes && node->va < va);
}

void gp__tree_insert(struct gp__tree *tree, struct gp__tree_node *node)
{
    uint64_t mine = priority(node);
    struct gp__tree_node **link = &tree->root;
    while (*link != NULL && priority(*link) >= mine)
        link = is_below(*link, node->bytes, node->va) ? &(*link)->right : &(*link)->left;
    /* The subtree here splits into what is below the new node and what is above it. */
    struct gp__tree_node *rest = *link;
    struct gp__tree_node **below = &node->left;
    struct gp__tree_node **above = &node->right;
    *link = node;
    while (rest != NULL) {
        if (is_below(rest, node->bytes, node->va)) {
            *below = rest;
            below = &rest->right;
            rest = rest->right;
        } else {
            *above = rest;
            above = &rest->left;
            rest = rest->left;
        }
    }
    *below = NULL;
    *above = NULL;
}

void gp__tree_remove(struct gp__tree *tree, struct gp__tree_node *node)
{
    struct gp__tree_node **link = &tree->root;
    while (*link != node)
        link = is_below(*link, node->bytes, node->va) ? &(*link)->right : &(*link)->left;
    struct gp__tree_node *left = node->left;
    struct gp__tree_node *right = node->right;
    while (left != NULL && right != NULL) {
        if (priority(left) >= priority(right)) {
            *link = left;
            link = &left->right;
            left = left->right;
        } else {
            *link = right;
            link = &right->left;
            right = right->left;
        }
    }
    *link = left != NULL ? left : right;
}

struct gp__tree_node *gp__tree_at_least(const struct gp__tree *tree, size_t bytes, uintptr_t va)
{
    struct gp__tree_node *best = NULL;
    for (struct gp__tree_node *node = tree->root; node != NULL;) {
        if (is_below(node, bytes, va)) {
            node = node->right;
        } else {
            best = node;
            node = node->left;
        }
    }
    return best;
}

struct gp__tree_node *gp__tree_below(const struct gp__tree *tree, size_t bytes, uintptr_t va)
{
    struct gp__tree_node *best = NULL;
    for (struct gp__tree_node *node = tree->root; node != NULL;) {
        if (is_below(node, bytes, va)) {
            best = node;
            node = node->right;
        } else {
            node = node->left;
        }
    }
    return best;
}
