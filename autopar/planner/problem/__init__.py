"""State what the planner is asked, as one integer program.

Sets

    class v, with copies_v equal vertices of the graph: ops, parameters, inputs, outputs of one choice     (symmetry.py)
    strategy k of v: layouts of what v reads and makes                                                   (strategies.py)
    hyperedge h: a tensor of a producer class with all its uses; copies_h of them are alike       (solver/hyperedges.py)
    layout p in which the producer makes it, layout q in which a consumer reads it, phase f: forward, backward

Variables

    strategy[v, k], recomputed[v, k] 0 or 1: v takes k, or takes it and runs once more in the backward
    reads[h, consumer, p, q]       the tensor is made in p and this consumer reads it in q
    made[h, p, q], kept[h, p, q]   the forward makes a copy in q, and keeps it for the backward
    redone[h, p, q]                the backward makes one
    saved[h, p]                    the tensor itself waits for the backward

Minimize  phase[forward] + phase[backward] + host                seconds of a step, of an average pass if it has several

    phase[f] = what its busiest stream needs: compute[f] + blocking[f] + drag * hidden[f] of the one that computes,
               blocking[f, x] + hidden[f, x] of the links of a class x (multipliers.py); of several passes the last
               backward has the gradients that are reduced once a step, the first forward the copies that are
    compute  = sum of copies * seconds[k], twice in the backward for what runs again    host: parameters that live there
    hidden   = sum of copies * seconds of gathered parameters and reduced gradients     blocking: of all other copies
    seconds of a copy: early (forward) or late (backward), by way (objective/modes.py)
        made, redone       the seconds of p -> q
        made before the first of m micro-batches and kept to the end of the step (step-invariant)    1 / m of them
        reduced once a step, of a gradient that waits for that                                       1 / m of them

Subject to

    constraint                                                                               where it is
    every class takes one strategy                  sum_k strategy + recomputed = 1          Program._one_hot
    what is read was made so                        sum_q reads = sum of the producer's k    Program._flow
                                                      that make p; the same for the consumer
    a copy is paid for once for all its readers     reads <= made                            Program._pay_once
    the backward makes a copy or reads a kept one   reads <= redone + kept, kept <= made     Program._serve
    only what the forward reads is kept             made <= sum of the forward's reads       Program._serve
    what a recipe keeps is not made anew (ZeRO-1)   made + redone <= 1                       Program._serve
    what the backward starts from is there          redone <= saved + recomputed (producer)  Program._serve
    memory where the forward ends                   resident + saved + kept bytes, with the  full_program.solve
                                                      gradients of earlier passes <= room
    memory where the backward ends                  resident + gradient bytes <= room        full_program.solve
    a recipe, a pin or a forbidden layout           some strategies are not there            allowed.allowed_strategies
    a gradient comes in its parameter's layout      a use whose consumer is the parameter    vertices.vertices_of

`resident` counts parameters, optimizer state and buffers; a parameter on the host leaves the copy that computes
(offload.py). Not linear, and settled for each plan: values between two ops, blocks that compute again as a whole,
buckets (objective/memory_timeline.py, objective/checkpoint_blocks.py).

Who solves it

    at given prices of a byte and of hidden seconds (multipliers.py) memory and overlap leave the rows for the
    objective:
    solver/dual.py bounds that, solver/minimize.py rounds and improves it, solver/ilp.py is the program of what is left
    solver/cutting_planes.py finds the prices; solver/memory_limit.py makes plans fit
    solver/last_word.py gives OR-tools what the bounds leave open, memory and streams as rows; not for a recipe's plan
    solver/squeeze.py changes what is near the peak where no plan fits, and small plans that do
    solver/full_program.py gives all of it to OR-tools at once, as a cross-check
    objective/evaluate.py computes the same cost on the unfolded graph: it must equal the solver's, for every plan
"""
