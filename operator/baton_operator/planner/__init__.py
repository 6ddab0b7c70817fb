"""How many nodes of each role a pool should have. Pure: no clock, no cluster, no I/O.

records    what is told and said: Situation, Policy, Decision, Reason
reasons    what each reason means, and what to do
plan       the rules in their order; below it:
  memory     what one look hands to the next
  fleet      the nodes of one role, counted
  schedule   bounds as of now, and what is wrong with a policy
  forecast   demand now, and at the time when a node asked for now would serve
  trend      growth, extrapolated
  queueing   how many servers keep a wait short
  prefill, decode   nodes that each role needs
  wish       those needs, or why they are not known; `measured` corrects them
  stabilise  recommendations over time
  fit        the best pair within bounds, ratio and budget
  limits     what of a wish the owner allows
  step       how much of it at once; `survivors` says whether fewer would do
  rest       to zero, and awake
  words      the decision as a sentence and numbers
learn      what a node can do, from what nodes report; steps: the fit of a decode step's time
"""
