"""Questions of one and two hops that an agent of OpenAI's Agents SDK answers by searching."""
